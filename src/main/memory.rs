//! How much memory goes where.

use candle_core::Device;
use foretoken::config::{Config, KvBudget};
use foretoken::error::{Error, Result};
use foretoken::kernels;
use foretoken::model::{Model, ModelConfig};
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

/// Most that the KV cache takes on a CPU unasked.
const MOST_ON_CPU: u64 = 2 << 30;
/// What libraries keep on a GPU for themselves, and kernels for partial results.
const LIBRARIES: u64 = 512 << 20;

/// Blocks of each pool, as many for the draft as for the target.
pub fn pool_blocks(
    config: &Config,
    target: &dyn Model,
    draft: Option<&dyn Model>,
    device: &Device,
) -> Result<usize> {
    let context = target.config().max_position_embeddings;
    let longest = config
        .engine
        .max_model_len
        .map_or(context, |len| len.min(context));
    let per_token: Vec<usize> = [Some(target), draft]
        .into_iter()
        .flatten()
        .map(|model| model.kv_bytes_per_token())
        .collect();
    let wanted = longest.saturating_mul(config.engine.max_num_seqs);
    let room = room(config, target, draft, device)?;
    let blocks = config
        .kv
        .blocks(config.block_size, &per_token, wanted, room)?;
    let tokens = blocks * config.block_size;
    let mib = |bytes: usize| (tokens * bytes) as f64 / f64::from(1 << 20);
    tracing::info!(
        "KV cache: {tokens} tokens, {:.0} MiB for the target",
        mib(per_token[0])
    );
    if let Some(&bytes) = per_token.get(1) {
        tracing::info!(
            "KV cache: {tokens} tokens, {:.0} MiB for the draft",
            mib(bytes)
        );
    }
    if tokens < longest {
        let remedy = if config.kv == KvBudget::Default {
            "set"
        } else {
            "raise"
        };
        if config.engine.max_model_len.is_some() {
            return Err(Error::setup(format!(
                "the KV cache holds {tokens} tokens and --max-model-len is {longest}: {remedy} --kv-cache-memory"
            )));
        }
        tracing::warn!(
            "the KV cache holds {tokens} tokens, the model {longest}: {remedy} --kv-cache-memory for longer texts"
        );
    }
    Ok(blocks)
}

/// Bytes that the KV cache may take where no flag says how many.
fn room(
    config: &Config,
    target: &dyn Model,
    draft: Option<&dyn Model>,
    device: &Device,
) -> Result<u64> {
    let Some((free, total)) = kernels::device_memory(device)? else {
        return Ok(MOST_ON_CPU.min(free_memory() / 4));
    };
    let usable = (total as f64 * config.gpu_memory_utilization) as u64;
    let weights = total - free;
    let models = [Some(target), draft];
    let workspaces = models.into_iter().flatten();
    let workspace = LIBRARIES
        + workspaces
            .map(|model| workspace(model.config(), config))
            .max()
            .unwrap_or(0);
    let left = usable.saturating_sub(weights + workspace);
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    tracing::info!(
        "GPU memory: {:.2} of {:.2} GiB usable; in use, weights included {:.2}, workspace {:.2}, for the KV cache {:.2}",
        gib(usable),
        gib(total),
        gib(weights),
        gib(workspace),
        gib(left)
    );
    if left == 0 && config.kv == KvBudget::Default {
        return Err(Error::setup(format!(
            "the GPU has {:.2} GiB, of which {:.2} are in use and {:.2} are needed as workspace: nothing is left for the KV cache within --gpu-memory-utilization {}",
            gib(total),
            gib(weights),
            gib(workspace),
            config.gpu_memory_utilization
        )));
    }
    Ok(left)
}

/// Bytes that a forward of all that a step may hold needs at most: of a layer all that is alive at
/// once, then logits, in f32 and before.
fn workspace(model: &ModelConfig, config: &Config) -> u64 {
    let heads = model.num_heads + 2 * model.num_kv_heads;
    let row = 4 * model.hidden_size + 2 * heads * model.head_dim + 3 * model.intermediate_size;
    let engine = &config.engine;
    let sampled = engine.max_num_seqs * (engine.spec_length + 1);
    let layer = engine.max_num_batched_tokens * row * size_of::<f32>();
    (layer + 2 * sampled * model.vocab_size * size_of::<f32>()) as u64
}

/// Memory that is free on this machine, or in its container.
fn free_memory() -> u64 {
    let memory = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    let system = System::new_with_specifics(memory);
    let container = system
        .cgroup_limits()
        .map_or(u64::MAX, |limits| limits.free_memory);
    system.available_memory().min(container)
}
