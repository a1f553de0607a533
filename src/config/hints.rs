//! What to say to somebody who knows the flags of vLLM, llama-server or ollama.

/// Flags of others, without dashes, and what there is here instead.
const FOREIGN: &[(&[&str], &str)] = &[
    // Models.
    (
        &["hf-repo", "hf-file", "hf", "hfr", "hff"],
        "give the model as ORG/NAME, ORG/NAME:Q4_K_M or ORG/NAME/FILE.gguf",
    ),
    (
        &[
            "model-draft",
            "md",
            "hf-repo-draft",
            "hfd",
            "speculative-model",
            "speculative-config",
        ],
        "use --draft-model",
    ),
    (&["alias", "a"], "use --served-model-name"),
    (
        &[
            "tokenizer",
            "tokenizer-mode",
            "hf-config-path",
            "hf-overrides",
        ],
        "the model's own files are used",
    ),
    (&["trust-remote-code"], "code of a model is never run"),
    (
        &["download-dir"],
        "set HF_HOME or HF_HUB_CACHE in the environment",
    ),
    (&["hf-token", "hft"], "set HF_TOKEN in the environment"),
    (
        &["quantization", "q"],
        "use --quantize; what is quantized already needs no flag",
    ),
    (
        &["task", "runner", "convert", "embedding", "embeddings"],
        "use --pooling; models that are made for embeddings need no flag",
    ),
    (
        &["chat-template", "chat-template-file"],
        "put chat_template.jinja beside the model's config.json",
    ),
    (&["jinja"], "leave it out: chat templates are always used"),
    (
        &[
            "lora",
            "enable-lora",
            "lora-modules",
            "mmproj",
            "limit-mm-per-prompt",
            "rope-scaling",
        ],
        "it is not supported",
    ),
    // Memory and speed.
    (
        &["ctx-size", "c", "num-ctx", "max-seq-len", "context-length"],
        "use --max-model-len",
    ),
    (
        &["n-gpu-layers", "ngl", "gpu-layers", "num-gpu"],
        "a model runs as a whole on --device",
    ),
    (
        &[
            "tensor-parallel-size",
            "tp",
            "pipeline-parallel-size",
            "pp",
            "data-parallel-size",
            "dp",
            "split-mode",
            "sm",
            "tensor-split",
            "ts",
        ],
        "a process uses one GPU; deploy/README.md has several behind a router",
    ),
    (&["main-gpu", "mg"], "use --device cuda:N"),
    (&["parallel", "np", "num-parallel"], "use --max-num-seqs"),
    (
        &["batch-size", "b", "ubatch-size", "ub", "max-num-tokens"],
        "use --max-num-batched-tokens",
    ),
    (&["threads-batch", "tb", "t", "num-thread"], "use --threads"),
    (
        &[
            "cache-type-k",
            "ctk",
            "cache-type-v",
            "ctv",
            "kv-cache-dtype",
        ],
        "use --dtype, which is also that of the KV cache",
    ),
    (&["kv-cache-memory-bytes"], "use --kv-cache-memory"),
    (&["num-gpu-blocks-override"], "use --num-blocks"),
    (
        &[
            "swap-space",
            "cpu-offload-gb",
            "mlock",
            "no-mmap",
            "keepalive",
        ],
        "weights stay in memory, and sequences without room are computed anew",
    ),
    (
        &[
            "flash-attn",
            "fa",
            "cont-batching",
            "cb",
            "enable-prefix-caching",
            "enable-chunked-prefill",
            "cache-prompt",
        ],
        "leave it out: it is always on",
    ),
    // Speculation.
    (
        &["draft", "draft-max", "draft-n", "num-speculative-tokens"],
        "use --spec-length",
    ),
    (
        &["draft-min", "draft-p-min"],
        "leave it out: drafts adapt by themselves",
    ),
    // Sampling.
    (
        &[
            "temp",
            "temperature",
            "top-k",
            "top-p",
            "min-p",
            "repeat-penalty",
            "n-predict",
            "n",
            "predict",
        ],
        "it belongs in a request, or for all requests in --override-generation-config '{\"temperature\": 0.7}'",
    ),
    // The server.
    (
        &[
            "enable-auto-tool-choice",
            "metrics",
            "guided-decoding-backend",
        ],
        "leave it out: it is always on",
    ),
    (
        &["enable-reasoning", "reasoning-format"],
        "use --reasoning-parser",
    ),
    (&["no-webui"], "use --no-ui"),
    (
        &["api-key-file"],
        "set FORETOKEN_API_KEY in the environment, or write `api-key = [...]` into the file of --config",
    ),
    (
        &[
            "ssl-keyfile",
            "ssl-certfile",
            "ssl-key-file",
            "ssl-cert-file",
        ],
        "there is no TLS: put a reverse proxy before the server",
    ),
    (
        &[
            "verbose",
            "v",
            "log-level",
            "uvicorn-log-level",
            "disable-log-requests",
        ],
        "set RUST_LOG in the environment",
    ),
    (&["log-file"], "the log goes to stderr: redirect it"),
];

/// What there is instead of the flag `name` of another server; `None` = no such flag is known.
pub fn instead_of(name: &str) -> Option<&'static str> {
    let name = name.trim_start_matches('-').replace('_', "-");
    let known = FOREIGN
        .iter()
        .find(|(names, _)| names.contains(&name.as_str()));
    known.map(|(_, hint)| *hint)
}

/// The first argument that is another server's short flag of several letters, such as `-ngl`, and what there
/// is instead: our parser would read its letters one by one.
pub fn long_short_flag<'a>(args: impl Iterator<Item = &'a str>) -> Option<(&'a str, &'static str)> {
    let names = args.filter_map(|arg| {
        let name = arg.split('=').next()?;
        let letters = name.strip_prefix('-')?;
        (letters.len() > 1 && !letters.starts_with('-')).then_some(name)
    });
    names
        .into_iter()
        .find_map(|name| Some((name, instead_of(name)?)))
}

/// What somebody may have meant who names `word` as a model.
pub fn instead_of_command(word: &str) -> Option<&'static str> {
    match word {
        "run" | "start" => {
            Some("`foretoken serve MODEL` serves a model, and `foretoken chat MODEL` talks to it")
        }
        "pull" | "download" => Some(
            "`foretoken check MODEL` looks at a model, and `foretoken serve MODEL` downloads it",
        ),
        "list" | "ls" | "ps" => Some("`foretoken check MODEL` looks at a model"),
        "quantize" => Some("`foretoken convert` does that"),
        _ => None,
    }
}

/// The one of `known` that `name` is nearly, if any is.
pub fn near<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = known.map(|known| (strsim::jaro_winkler(name, known), known));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(score, _)| *score > 0.85)
        .map(|(_, known)| known)
}
