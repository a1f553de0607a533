#!/usr/bin/env python3
"""Makes tests/fixtures/embeddings: a tiny random embedding model, and what transformers and sentence-transformers compute.

    pip install torch transformers sentence-transformers
    scripts/make-embedding-fixture.py

The folder is as sentence-transformers saves one: a `Qwen3Model`, whose tensors have no `model.` in front and which has
no output layer (weights in f32, of values that bf16 holds, stored as bf16), a tokenizer that ends each text with
`<|endoftext|>`, as that of Qwen3-Embedding does, `modules.json`, and `1_Pooling/config.json`.

`prompted.json` has what sentence-transformers writes to `config_sentence_transformers.json` of the same model with
prompts, and what it encodes with the default one and either pooling.

`expected.json` is a list of texts or token ids with the `last` hidden state after the final norm and their `mean`, computed
in f32, and of texts the `embedding` that sentence-transformers encodes (the last hidden state, normalized).
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

FOLDER = Path(__file__).resolve().parent.parent / "tests/fixtures/embeddings"
END = "<|endoftext|>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CONFIG = transformers.Qwen3Config(
    vocab_size=len(BYTES) + 1,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=len(BYTES),
    pad_token_id=len(BYTES),
)
TEXTS = [
    "a",
    "The capital of China is Beijing.",
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: What is gravity?",
    "Über die Würde: 你好, 世界! 🙂",
]
PROMPTS = {"query": "Instruct: Find passages that answer the query\nQuery: ", "document": ""}
# Token ids alone, longer than a chunk of a prompt.
LENGTHS = [1, 2, 40, 200]


def tokenizer():
    made = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(BYTES)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    made.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, made.token_to_id(END))]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=END, padding_side="left", model_max_length=256
    )


def randomize(model):
    generator = torch.Generator().manual_seed(30)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                noise *= 0.7 if "embed_tokens" in name else 1.3 / parameter.shape[1] ** 0.5
            else:
                noise = 0.3 * noise + parameter
            parameter.copy_(noise.to(torch.bfloat16).float())
    return generator


def states(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0].double()


def with_prompts(plain):
    """What `prompted.json` has, of the model in the folder `plain`."""
    found = {"texts": TEXTS}
    for mode in ["lasttoken", "mean"]:
        parts = [Transformer(plain), Pooling(CONFIG.hidden_size, pooling_mode=mode), Normalize()]
        model = SentenceTransformer(modules=parts, device="cpu", prompts=PROMPTS, default_prompt_name="query")
        found[mode] = [[round(x, 7) for x in model.encode([text])[0].tolist()] for text in TEXTS]
        with tempfile.TemporaryDirectory() as saved:
            model.save(saved)
            config = json.loads((Path(saved) / "config_sentence_transformers.json").read_text())
        del config["__version__"]
        found["config"] = config
    return found


def main():
    model = transformers.Qwen3Model(CONFIG).eval()
    generator = randomize(model)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(plain)
        tokenizer().save_pretrained(plain)
        parts = [Transformer(plain), Pooling(CONFIG.hidden_size, pooling_mode="lasttoken"), Normalize()]
        whole = SentenceTransformer(modules=parts, device="cpu")
        whole.save(saved)
        prompted = with_prompts(plain)
        encoded = {text: whole.encode([text])[0].tolist() for text in TEXTS}
        ids_of = {text: whole.tokenizer(text)["input_ids"] for text in TEXTS}
        for name in ["config.json", "modules.json", "1_Pooling/config.json", "tokenizer.json", "tokenizer_config.json"]:
            (FOLDER / name).parent.mkdir(exist_ok=True)
            shutil.copy(Path(saved) / name, FOLDER / name)
        weights = load_file(Path(saved) / "model.safetensors")
        save_file({k: v.to(torch.bfloat16) for k, v in weights.items()}, FOLDER / "model.safetensors")
    inputs = [(text, ids_of[text]) for text in TEXTS]
    inputs += [(None, torch.randint(0, len(BYTES), (n,), generator=generator).tolist()) for n in LENGTHS]
    expected = []
    for text, ids in inputs:
        rows = states(model, ids)
        last, mean = rows[-1], rows.mean(0)
        one = {"ids": ids, "last": [round(x, 7) for x in last.tolist()], "mean": [round(x, 7) for x in mean.tolist()]}
        if text is not None:
            assert ids[-1] == CONFIG.eos_token_id
            embedding = torch.tensor(encoded[text])
            assert torch.allclose(embedding.double(), last / last.norm(), atol=1e-5), text
            one |= {"text": text, "embedding": [round(x, 7) for x in encoded[text]]}
        expected.append(one)
    text = json.dumps(prompted, ensure_ascii=False, indent=1)
    (FOLDER / "prompted.json").write_text(text + "\n")
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in expected)
    (FOLDER / "expected.json").write_text(f"[\n{lines}\n]\n")
    size = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    print(f"{FOLDER}: {size / 1024:.0f} KiB, tensors {sorted(weights)[:3]} ...")


if __name__ == "__main__":
    main()
