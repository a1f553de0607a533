//! Starts the engine's thread.

use super::cache_key::CacheKey;
use super::chunk::PromptChunk;
use super::cost_cache::CostWriter;
use super::handle::EngineHandle;
use super::limits::RequestLimits;
use super::options::EngineOptions;
use super::prefix_disk::PrefixDisk;
use super::scheduler::Scheduler;
use super::shared::EngineShared;
use super::stats::Stats;
use super::{Engine, panicked};
use crate::spec::{BudgetMode, Drafter, MeasuredForward, SpeculativeRunner};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::BlockAllocator;
use foretoken_core::model::Model;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{Semaphore, watch};

/// Number of times that the prompts of one request's sequences may fill the pool together.
const PROMPT_POOLS: usize = 8;
/// Tokens that the prompts of one request's sequences may have together in any case.
const MIN_PROMPT_TOKENS: usize = 1 << 17;

/// Starts the engine thread over `target` and `drafter`, with a target pool of `num_blocks` blocks
/// of `block_size` tokens. A draft model's own pool must have at least as many tokens.
///
/// # Errors
/// `Setup` if the options are incompatible or there is no memory for the pool.
pub fn spawn(
    target: Box<dyn Model>,
    drafter: Option<Box<dyn Drafter>>,
    num_blocks: usize,
    block_size: usize,
    options: EngineOptions,
) -> Result<EngineHandle> {
    let drafters = drafter.into_iter().collect();
    spawn_with(target, drafters, num_blocks, block_size, options)
}

/// As [`spawn`], but over several drafters. The first one drafts until [`EngineHandle::use_drafter`].
///
/// # Errors
/// Returns the errors of [`spawn`].
pub fn spawn_with(
    target: Box<dyn Model>,
    drafters: Vec<Box<dyn Drafter>>,
    num_blocks: usize,
    block_size: usize,
    options: EngineOptions,
) -> Result<EngineHandle> {
    let (engine, handle) = build(target, drafters, num_blocks, block_size, options)?;
    start(engine)?;
    Ok(handle)
}

/// Starts the thread, which tells how it ends.
pub(super) fn start(engine: Engine) -> Result<()> {
    let (shared, ending) = (engine.shared.clone(), engine.shared.clone());
    let thread = std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || {
            let end = catch_unwind(AssertUnwindSafe(|| engine.run()))
                .unwrap_or_else(|panic| Err(panicked("the engine thread", &*panic)));
            if let Err(error) = &end {
                tracing::error!("the engine has ended: {error}");
            }
            // In this order: `EngineShared::gone` reads them in the other one.
            ending.ended.send_replace(Some(end));
            ending.draining.store(true, Ordering::SeqCst);
        })
        .map_err(|e| Error::setup(format!("cannot start the engine thread: {e}")))?;
    *shared.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    Ok(())
}

/// The thread's state before it runs, and a handle; see [`spawn`].
pub(super) fn build(
    target: Box<dyn Model>,
    drafters: Vec<Box<dyn Drafter>>,
    num_blocks: usize,
    block_size: usize,
    options: EngineOptions,
) -> Result<(Engine, EngineHandle)> {
    let (mut spec, drafts) = (options.spec, drafters.len());
    if drafters.is_empty() {
        spec.length = 0;
    }
    for (name, count) in [
        ("max-num-batched-tokens", options.max_num_batched_tokens),
        ("max-num-seqs", options.max_num_seqs),
    ] {
        if count == 0 {
            return Err(Error::setup(format!("{name} must be at least 1")));
        }
    }
    let info = target.info();
    let eos_token_ids = info.eos_token_ids.clone();
    let pool = num_blocks.saturating_mul(block_size);
    let longest = options.longest(info.max_position_embeddings)?;
    if options.max_model_len.is_some() && pool < longest {
        return Err(Error::setup(format!(
            "the KV pool holds {pool} tokens and --max-model-len is {longest}: raise --kv-cache-memory or --num-blocks"
        )));
    }
    let mut max_model_len = longest.min(pool);
    let (reads_whole_texts, rows) = (info.is_bidirectional, options.max_num_batched_tokens);
    if reads_whole_texts && max_model_len > rows {
        if options.max_model_len.is_some() {
            return Err(Error::setup(format!(
                "--max-model-len is {longest} and --max-num-batched-tokens {rows}: this model reads each text in one step, so raise the second, or lower the first"
            )));
        }
        tracing::info!(
            "texts have up to {rows} tokens, as many as a step (--max-num-batched-tokens): this model reads each text in one step"
        );
        max_model_len = rows;
    }
    if max_model_len < 2 {
        return Err(Error::setup(format!(
            "the KV pool holds {pool} tokens and a sequence may have {max_model_len}, too few for any request: raise --kv-cache-memory, --num-blocks or --max-model-len"
        )));
    }
    // The semaphore's permits are acquired as 32-bit counts.
    let max_waiting = options.max_waiting.min(u32::MAX as usize);
    let limits = RequestLimits {
        max_model_len,
        vocab_size: info.vocab_size,
        max_logprobs: options.max_logprobs,
        max_waiting,
        max_prompt_tokens: pool.saturating_mul(PROMPT_POOLS).max(MIN_PROMPT_TOKENS),
        spec_length: spec.length,
        generates: target.generates() && !reads_whole_texts,
        embedding_size: info.hidden_size,
        takes_adapters: options.max_loras > 0 && target.takes_adapters(),
    };
    options.check_disk()?;
    // What a token's keys and values are depends on those after it.
    if reads_whole_texts && options.prefix_cache_disk.is_some() {
        return Err(Error::setup(
            "--prefix-cache-disk: the tokens of this model see those after them, so it has no prefixes to keep: leave it out",
        ));
    }
    let caches = !options.no_prefix_caching && !reads_whole_texts;
    let mut runner = SpeculativeRunner::new(
        target,
        drafters,
        options.spec_budget,
        num_blocks,
        block_size,
    )?;
    if !caches {
        runner = runner.without_prefix_cache();
    }
    let stats = Arc::new(Stats::new(&options.model_name));
    let disk = open_disk(&options, &mut runner, block_size, &stats)?;
    let shared = Arc::new(EngineShared {
        limits,
        eos_token_ids,
        stats,
        cache_key: (disk.as_ref()).map_or_else(CacheKey::random, |disk| disk.key().clone()),
        next_group: AtomicU64::new(0),
        unread: AtomicUsize::new(0),
        permits: Arc::new(Semaphore::new(max_waiting)),
        draining: AtomicBool::new(false),
        series: AtomicUsize::new(0),
        aborting: AtomicBool::new(false),
        ended: watch::Sender::new(None),
        thread: Mutex::new(None),
    });
    if shared.limits.takes_adapters {
        shared.stats.count_adapters(options.max_loras);
    }
    (shared.stats).set_cache_config(num_blocks, block_size, caches);
    let (sender, inbox) = channel();
    if options.calibrate && options.spec_budget == BudgetMode::Adaptive {
        let nodes = options.max_num_seqs.saturating_mul(spec.nodes);
        let nodes = nodes.min(options.step_limits.draft_rows);
        let rows = options.max_num_seqs.saturating_add(nodes);
        log_costs(&runner.calibrate(rows.min(options.max_num_batched_tokens))?);
    }
    let costs = options.cost_cache;
    let learns = drafts > 0 && options.spec_budget == BudgetMode::Adaptive;
    let costs = costs.filter(|_| learns);
    if let Some(cache) = &costs {
        runner.recall(&cache.read(drafts));
    }
    let engine = Engine {
        inbox,
        shared: shared.clone(),
        scheduler: Scheduler::new(
            BlockAllocator::new(num_blocks, block_size).with_prefix_cache(caches),
            options.max_num_seqs,
            options.max_num_batched_tokens,
            PromptChunk::new(options.max_prompt_wait),
            options.step_limits,
        )
        .with_interruptions(runner.max_interruptible())
        .with_whole_texts(reads_whole_texts),
        runner,
        disk,
        spec,
        acceptance: options.acceptance,
        next_id: 0,
        concerned: Vec::new(),
        has_failed: false,
        checked: true,
        costs: costs.map(CostWriter::new),
    };
    Ok((engine, EngineHandle { sender, shared }))
}

/// Opens the prefix cache on disk, if there is to be one.
fn open_disk(
    options: &EngineOptions,
    runner: &mut SpeculativeRunner,
    block_size: usize,
    stats: &Arc<Stats>,
) -> Result<Option<PrefixDisk>> {
    let Some(folder) = &options.prefix_cache_disk else {
        return Ok(None);
    };
    let identities = runner.identities(&options.model_identity)?;
    let limit = options.prefix_cache_disk_size as u64;
    let disk = PrefixDisk::open(folder, limit, block_size, &identities, stats)?;
    Ok(Some(disk))
}

fn log_costs(measured: &[MeasuredForward]) {
    if !measured.is_empty() {
        let cost = |one: &MeasuredForward| {
            let experts = match one.experts_read {
                0 => String::new(),
                experts => format!(" with {experts} experts"),
            };
            let context = match one.context {
                0 => String::new(),
                context => format!(" after {context} tokens"),
            };
            format!(
                "{}{context}: {:.2} ms{experts}",
                one.rows,
                1e3 * one.seconds
            )
        };
        let costs: Vec<String> = measured.iter().map(cost).collect();
        tracing::info!("a step by its number of rows: {}", costs.join(", "));
    }
}
