//! Memory budget: KV pools, weights and workspace.

use super::device_memory::DeviceMemory;
use crate::config::{Config, KvBudget};
use crate::error::{Error, Result};
use crate::kernels::MAX_GPU_STATES;
use crate::model::{Model, ModelInfo};
use crate::spec::max_state_copies;
use sysinfo::{
    CGroupLimits, MemoryRefreshKind, Pid, Process, ProcessRefreshKind, ProcessesToUpdate,
    RefreshKind, System,
};

/// Maximum bytes of the default KV cache on a CPU.
const MAX_CPU_KV_BYTES: u64 = 2 << 30;
/// Bytes that libraries reserve on a GPU, and kernels for partial results.
const LIBRARY_BYTES: u64 = 512 << 20;

/// The KV pools of target and draft.
#[derive(Debug)]
pub struct Cache {
    /// Blocks per pool, the same number for target and drafts.
    pub blocks: usize,
    /// Tokens per pool.
    pub tokens: usize,
    /// Bytes of a token in each pool.
    pub per_token: Vec<usize>,
    /// The same on each of several GPUs; a single element otherwise.
    pub by_gpu: Vec<Vec<usize>>,
    /// Bytes of the target's recurrent state of a sequence; 0 = it has none.
    pub per_state: usize,
    /// Tokens of the longest sequence that may be asked for.
    pub longest: usize,
}

/// The weights of target and drafts on a CPU.
#[derive(Debug, Clone, Copy)]
pub struct HostWeights {
    pub bytes: u64,
    /// Whether they are in memory already.
    pub are_loaded: bool,
}

impl HostWeights {
    /// Bytes beside them, of `total` of which `free` are free. Where they are not loaded, another server may have loaded them
    /// here: what is free now says little.
    fn room(self, (total, free): (u64, u64)) -> u64 {
        if self.are_loaded {
            free
        } else {
            total.saturating_sub(self.bytes)
        }
    }
}

/// Sizes the pools of the target and of each of `drafts`. `gpus` hold the memory that the models take; none on a CPU, where
/// they take `weights`.
///
/// # Errors
/// `Setup`, naming the flag, if there is no room for what is asked for.
pub fn cache(
    config: &Config,
    target: &dyn Model,
    drafts: &[&dyn Model],
    weights: HostWeights,
    gpus: &mut [DeviceMemory],
) -> Result<Cache> {
    let context = target.info().max_position_embeddings;
    let longest = config.engine.longest(context)?;
    let models = || std::iter::once(target).chain(drafts.iter().copied());
    let per_token: Vec<usize> = models()
        .map(|model| model.kv_shape().bytes_per_token())
        .collect();
    let wanted = longest.saturating_mul(config.engine.max_num_seqs);
    let per_state = target.kv_shape().bytes_per_state();
    let by_gpu: Vec<Vec<usize>> = (0..gpus.len().max(1))
        .map(|gpu| {
            models()
                .map(|model| model.kv_shape().bytes_per_token_on(gpu))
                .collect()
        })
        .collect();
    if !gpus.is_empty() {
        check_count_of_states(config, per_state)?;
    }
    let states = count_of_states(config, per_state) as u64;
    let states_on = |gpu| states.saturating_mul(target.kv_shape().bytes_per_state_on(gpu) as u64);
    let needs = models().map(|model| workspace(model.info(), config)).max();
    let mut rooms = Vec::new();
    for (gpu, budget) in gpus.iter_mut().enumerate() {
        budget.add("workspace", LIBRARY_BYTES + needs.unwrap_or(0));
        let states = states_on(gpu);
        if states > 0 {
            budget.add("recurrent states", states);
        }
        let context = longest.saturating_mul(by_gpu[gpu].iter().sum());
        rooms.push(budget.left(config, context as u64)?);
    }
    let blocks = match (config.kv, rooms.is_empty()) {
        // The number of blocks is the same on all GPUs.
        (KvBudget::Default, false) => {
            let of = |(per_token, room): (&Vec<usize>, u64)| {
                config.kv.blocks(config.block_size, per_token, wanted, room)
            };
            let each = by_gpu.iter().zip(rooms).map(of);
            let each: Vec<usize> = each.collect::<Result<_>>()?;
            each.into_iter().min().unwrap_or_default()
        }
        _ => {
            let room = MAX_CPU_KV_BYTES.min(weights.room(memory()) / 4);
            config
                .kv
                .blocks(config.block_size, &per_token, wanted, room)?
        }
    };
    let on_cpu = gpus.is_empty().then_some(weights.bytes);
    let tokens = check_cache(blocks, config, &per_token, on_cpu)?;
    for (gpu, per_token) in by_gpu.iter().enumerate() {
        let cache = tokens * per_token.iter().sum::<usize>();
        let budget = gpus.get(gpu);
        if let Some(budget) = budget {
            budget.check(cache as u64, config)?;
        }
        // A GPU's budget knows its weights.
        let memory = budget.map_or_else(
            || total_memory().saturating_sub(weights.bytes),
            DeviceMemory::total,
        );
        check_states(config, (per_state, states_on(gpu)), cache, memory)?;
    }
    if tokens < longest && config.engine.max_model_len.is_some() {
        let remedy = remedy(config);
        return Err(Error::setup(format!(
            "the KV cache holds {tokens} tokens and --max-model-len is {longest}: {remedy} --kv-cache-memory"
        )));
    }
    Ok(Cache {
        blocks,
        tokens,
        per_token,
        by_gpu,
        per_state,
        longest,
    })
}

/// The number of the recurrent states of all sequences, of `per_state` bytes each on all GPUs together.
fn count_of_states(config: &Config, per_state: usize) -> usize {
    if per_state == 0 {
        return 0;
    }
    let (each, beside) = kinds_of_states(config, per_state);
    each * config.engine.max_num_seqs + beside
}

/// The number of recurrent states of each sequence, and of those beside them.
fn kinds_of_states(config: &Config, per_state: usize) -> (usize, usize) {
    // Its own, with a prefix cache the copy after its last whole block; and what a step has beside them that may be
    // interrupted: the state before it, with a prefix cache also those of two blocks that it may end.
    if config.engine.no_prefix_caching {
        (1, 1)
    } else {
        (2, 3 + max_state_copies(per_state))
    }
}

/// Checks that a GPU has places for the recurrent states of all sequences.
fn check_count_of_states(config: &Config, per_state: usize) -> Result<()> {
    let states = count_of_states(config, per_state);
    if states <= MAX_GPU_STATES {
        return Ok(());
    }
    let (each, beside) = kinds_of_states(config, per_state);
    let most = (MAX_GPU_STATES - beside) / each;
    let sequences = config.engine.max_num_seqs;
    Err(Error::setup(format!(
        "--max-num-seqs {sequences} needs {states} recurrent states, and a GPU takes {MAX_GPU_STATES}: at most {most} is accepted"
    )))
}

/// What the log tells of recurrent states of `per_state` bytes each.
fn told_of_states(config: &Config, per_state: usize) -> String {
    let mib = per_state as f64 / f64::from(1 << 20);
    let each = format!("recurrent states: {mib:.1} MiB a sequence");
    if config.engine.no_prefix_caching {
        return each;
    }
    let copies = max_state_copies(per_state);
    format!("{each}, and up to {copies} copies for prefixes")
}

/// Checks that there is memory for recurrent states, of `per_state` bytes each and `bytes` bytes together, beside a KV cache
/// of so many bytes.
fn check_states(
    config: &Config,
    (per_state, bytes): (usize, u64),
    cache: usize,
    memory: u64,
) -> Result<()> {
    if per_state == 0 || bytes.saturating_add(cache as u64) <= memory {
        return Ok(());
    }
    let sequences = config.engine.max_num_seqs;
    Err(Error::setup(format!(
        "the recurrent states of {sequences} sequences take {bytes} bytes, {per_state} each, beside a KV cache of {cache}, and there is room for {memory}: lower --max-num-seqs"
    )))
}

/// The verb for what to do with `--kv-cache-memory` to get more memory.
fn remedy(config: &Config) -> &'static str {
    match config.kv {
        KvBudget::Default => "set",
        _ => "raise",
    }
}

impl Cache {
    /// Logs what the pools take. `gpus` hold the memory that everything else takes.
    pub fn log(&self, config: &Config, mut gpus: Vec<DeviceMemory>) {
        let (tokens, longest) = (self.tokens, self.longest);
        if gpus.is_empty() {
            let cache = tokens as u64 * self.per_token.iter().sum::<usize>() as u64;
            let states = count_of_states(config, self.per_state) as u64 * self.per_state as u64;
            if let Some(warning) = cache_warning(cache, states, free_memory()) {
                tracing::warn!("{warning}");
            }
        }
        for (i, &bytes) in self.per_token.iter().enumerate() {
            let whose = if i == 0 { "target" } else { "draft" };
            let mib = (tokens * bytes) as f64 / f64::from(1 << 20);
            tracing::info!("KV cache: {tokens} tokens, {mib:.0} MiB for the {whose}");
            for (budget, per_token) in gpus.iter_mut().zip(&self.by_gpu) {
                if per_token[i] > 0 {
                    budget.add(format!("KV cache, {whose}"), (tokens * per_token[i]) as u64);
                }
            }
        }
        if self.per_state > 0 {
            tracing::info!("{}", told_of_states(config, self.per_state));
        }
        for budget in gpus {
            tracing::info!("{budget}");
        }
        if tokens < longest {
            let remedy = remedy(config);
            tracing::warn!(
                "the KV cache holds {tokens} tokens, the context {longest}: {remedy} --kv-cache-memory for longer texts"
            );
        }
    }
}

/// What is said of a KV cache of so many bytes, and of recurrent states, for which the memory that is `free` on a CPU is not
/// enough: they fill some time later, and if the system ends the process then, nothing else is said.
fn cache_warning(cache: u64, states: u64, free: u64) -> Option<String> {
    if cache.saturating_add(states) <= free {
        return None;
    }
    let (and_states, seqs) = match states {
        0 => (String::new(), ""),
        _ => (
            format!(" and recurrent states {states}"),
            "--max-num-seqs, ",
        ),
    };
    Some(format!(
        "once used, the KV cache takes {cache} bytes{and_states}, and only {free} are free, so the system may end this process: lower {seqs}--num-blocks or --kv-cache-memory"
    ))
}

/// Checks that `blocks` can be addressed and, on a CPU, that the machine has the memory for them beside so many bytes of
/// weights. Returns their tokens.
fn check_cache(
    blocks: usize,
    config: &Config,
    per_token: &[usize],
    weights: Option<u64>,
) -> Result<usize> {
    let remedy = "lower --num-blocks, --kv-cache-memory or --block-size";
    let tokens = (blocks.checked_mul(config.block_size))
        .filter(|&tokens| tokens <= i32::MAX as usize)
        .ok_or_else(|| {
            let size = config.block_size;
            let max = i32::MAX;
            Error::setup(format!(
                "the KV cache of {blocks} blocks of {size} tokens is over {max} tokens: {remedy}"
            ))
        })?;
    let bytes = (tokens as u64).saturating_mul(per_token.iter().sum::<usize>() as u64);
    let memory = total_memory();
    match weights {
        Some(weights) if bytes.saturating_add(weights) > memory => Err(Error::setup(format!(
            "the KV cache takes {bytes} bytes beside weights of {weights}, and this machine has {memory}: {remedy}"
        ))),
        _ => Ok(tokens),
    }
}

/// Checks the numbers for which memory is allocated, or time is waited, whatever the model.
///
/// # Errors
/// `Setup`, naming the flag.
pub fn check_limits(config: &Config) -> Result<()> {
    let engine = &config.engine;
    let memory = usize::try_from(total_memory()).unwrap_or(usize::MAX);
    for (flag, number, max) in [
        ("--block-size", config.block_size, 1 << 20),
        ("--max-num-seqs", engine.max_num_seqs, 1 << 16),
        (
            "--max-num-batched-tokens",
            engine.max_num_batched_tokens,
            1 << 20,
        ),
        ("--max-waiting", engine.max_waiting, 1 << 24),
        (
            "--max-connections",
            config.http.listen.limits.max_connections,
            1 << 24,
        ),
        (
            "--max-body-bytes",
            config.http.listen.limits.max_body_bytes,
            memory,
        ),
        ("--tables-memory", config.tables.memory, memory),
        ("--spec-length", engine.spec.length, 1 << 16),
    ] {
        if number > max {
            return Err(Error::setup(format!(
                "{flag} {number} is too much for this machine: at most {max} is accepted"
            )));
        }
    }
    Ok(())
}

/// Memory in bytes of this machine, or of the container or unit of systemd that this process is in.
pub fn total_memory() -> u64 {
    memory().0
}

/// The free part of [`total_memory`], in bytes.
pub fn free_memory() -> u64 {
    memory().1
}

/// [`total_memory`] and [`free_memory`].
fn memory() -> (u64, u64) {
    let memory = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    let mut system = System::new_with_specifics(memory);
    let (total, free) = (system.total_memory(), system.available_memory());
    match cgroup_limits(&mut system) {
        Some(limits) => {
            // What a container has in use counts the pages of files that were read, as a model's are, which the kernel gives
            // up. `rss` leaves them out, and files in memory (tmpfs), too.
            let within = limits.total_memory;
            let unused = within.saturating_sub(limits.rss);
            (total.min(within), free.min(unused))
        }
        None => (total, free),
    }
}

/// The limits of the control group of this process and of those above it. A container may not see these under their names:
/// then those of the group that it sees as the root.
fn cgroup_limits(system: &mut System) -> Option<CGroupLimits> {
    let this = Pid::from_u32(std::process::id());
    let kind = ProcessRefreshKind::nothing().without_tasks();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[this]), false, kind);
    let own = system.process(this).and_then(Process::cgroup_limits);
    own.or_else(|| system.cgroup_limits())
}

/// Upper bound in bytes on the workspace of a forward with the maximum rows of a step: the live
/// activations of one layer, the logits (in f32 and before conversion), the probabilities made from
/// them, and the draft distributions.
fn workspace(model: &ModelInfo, config: &Config) -> u64 {
    let engine = &config.engine;
    let rows = engine.max_num_batched_tokens;
    let sampled = rows.min(engine.max_num_seqs + engine.step_limits.draft_rows);
    ((rows * model.row_values + 4 * sampled * model.vocab_size) * size_of::<f32>()) as u64
}

#[cfg(test)]
mod tests;
