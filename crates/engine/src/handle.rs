//! The interface to the engine: checks, the bounded queue, shutdown.

use super::cache_key::CacheKey;
use super::cost_cache::CostCache;
use super::events::Events;
use super::request::{Event, Request, queue_cost};
use super::stats::Stats;
use crate::spec::BudgetMode;
use candle_core::Device;
use foretoken_core::error::{Error, RequestErrorKind, Result};
use foretoken_core::sampling::{Acceptance, SamplingParams};
#[cfg(feature = "clap")]
use foretoken_core::{
    model::MAX_TREE_NODES,
    parse::{at_least_one, bytes, number},
};
use foretoken_kernels as kernels;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

/// Maximum number of stop ids of a request, not counting EOS.
pub const MAX_STOP_TOKEN_IDS: usize = 1024;
/// Maximum number of tokens that a request may bias.
pub const MAX_LOGIT_BIASES: usize = 1024;

/// Limits of the scheduler and of drafts.
#[derive(Debug, Clone)]
#[cfg_attr(
    feature = "clap",
    derive(clap::Args),
    command(next_help_heading = "Scheduling")
)]
pub struct EngineOptions {
    /// Longest sequence, prompt and output together; at most the model's limit, which is the default.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", value_parser = at_least_one))]
    pub max_model_len: Option<usize>,
    /// Maximum number of requests in one batch.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Self::default().max_num_seqs,
          value_parser = at_least_one))]
    pub max_num_seqs: usize,
    /// Maximum number of tokens in one target forward, prompt chunks and drafts together.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Self::default().max_num_batched_tokens,
          value_parser = at_least_one))]
    pub max_num_batched_tokens: usize,
    /// Approximate milliseconds per step that running texts wait for the prompts of others. Chunk
    /// sizes follow from measured speed. A higher value reads prompts sooner but leaves longer
    /// gaps.
    #[cfg_attr(feature = "clap", arg(long, value_name = "MS", default_value = "100",
          value_parser = |text: &str| text.parse().map(Duration::from_millis)))]
    pub max_prompt_wait: Duration,
    /// Maximum number of requests in the queue; further requests are answered 429.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Self::default().max_waiting,
          value_parser = at_least_one))]
    pub max_waiting: usize,
    /// Maximum number of alternatives that a request may ask for with log-probabilities.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Self::default().max_logprobs))]
    pub max_logprobs: usize,
    /// Compute every prompt as a whole, instead of starting after the longest prefix whose keys and values
    /// are still in the KV cache. No text depends on it on the CPU.
    #[cfg_attr(feature = "clap", arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = clap::ArgAction::Set))]
    pub no_prefix_caching: bool,
    /// Folder in which the prefix cache is kept, too, so that a prompt is read once, also by later processes. On the CPU.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "DIR", help_heading = "Memory")
    )]
    pub prefix_cache_disk: Option<PathBuf>,
    /// Maximum size of the files in that folder, of all models: 10GiB, 500MB or plain bytes. The oldest ones go first.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE", default_value = "10GiB", value_parser = bytes,
          requires = "prefix_cache_disk", help_heading = "Memory"))]
    pub prefix_cache_disk_size: usize,
    /// Limits of drafts.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub spec: SpecLimits,
    /// The acceptance rule of requests that name none.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_enum, default_value_t, help_heading = "Speculation")
    )]
    pub acceptance: Acceptance,
    /// How much of what a drafter proposes is verified.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_enum, default_value_t, help_heading = "Speculation")
    )]
    pub spec_budget: BudgetMode,
    /// Learn anew what drafts cost and how often they are accepted, instead of beginning with what this machine has
    /// learned of the same models before. No text depends on it.
    #[cfg_attr(feature = "clap", arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = clap::ArgAction::Set,
          help_heading = "Speculation"))]
    pub no_cost_cache: bool,
    /// Where to keep what is learned; `None` = nowhere.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub cost_cache: Option<CostCache>,
    /// Whether the costs of steps are measured before the first request.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub calibrate: bool,
    /// Limits of a step that are not set by flags.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub step_limits: StepLimits,
    /// Maximum number of different adapters of requests; 0 = requests have none.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub max_loras: usize,
    /// Name in logs and metrics.
    #[cfg_attr(feature = "clap", arg(skip = Self::default().model_name))]
    pub model_name: String,
    /// Differs where the models' files or how they are loaded differ, so that nothing on disk is taken for what another
    /// model computed.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub model_identity: String,
}

impl EngineOptions {
    /// Checks that the prefix cache can be kept on disk, if it is asked for, for models on this device.
    ///
    /// # Errors
    /// `Setup`, naming the flag.
    pub fn check_disk(&self, device: &Device) -> Result<()> {
        if self.prefix_cache_disk.is_none() {
            return Ok(());
        }
        if self.no_prefix_caching {
            return Err(Error::setup(
                "--prefix-cache-disk keeps the prefix cache: leave out --no-prefix-caching",
            ));
        }
        if !device.is_cpu() {
            return Err(Error::setup(
                "--prefix-cache-disk keeps what a CPU computes: leave it out, or use --device cpu",
            ));
        }
        Ok(())
    }

    /// Tokens of the longest sequence of a model for `context` tokens.
    ///
    /// # Errors
    /// `Setup`: more are asked for.
    pub fn longest(&self, context: usize) -> Result<usize> {
        match self.max_model_len {
            Some(wanted) if wanted > context => Err(Error::setup(format!(
                "--max-model-len {wanted} is more than the model takes, which is {context} tokens: lower it, or leave it out"
            ))),
            wanted => Ok(wanted.unwrap_or(context)),
        }
    }
}

/// Limits of the drafts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "clap",
    derive(clap::Args),
    command(next_help_heading = "Speculation"),
    group(skip)
)]
pub struct SpecLimits {
    /// Maximum depth (K); 0 without a drafter.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub length: usize,
    /// Maximum number of draft tokens of a request in a step, 1 to 64.
    #[cfg_attr(feature = "clap", arg(long = "spec-nodes", value_name = "N", default_value_t = Self::default().nodes,
          value_parser = up_to_a_tree))]
    pub nodes: usize,
    /// Maximum number of siblings in a draft, 1 to 64; 1 = chains. The default is 4 in a program
    /// built with CUDA, otherwise 1.
    #[cfg_attr(feature = "clap", arg(long = "spec-topk", value_name = "N", default_value_t = Self::default().topk,
          value_parser = up_to_a_tree))]
    pub topk: usize,
}

/// Parses a number of draft nodes.
#[cfg(feature = "clap")]
fn up_to_a_tree(text: &str) -> Result<usize, String> {
    number(
        format!("a whole number between 1 and {MAX_TREE_NODES}"),
        |n: &usize| (1..=MAX_TREE_NODES).contains(n),
    )(text)
}

impl Default for SpecLimits {
    /// No drafts, and the other limits' defaults.
    fn default() -> Self {
        Self {
            length: 0,
            nodes: 15,
            // Siblings pay where rows are nearly free. On the measured CPUs a chain is as good or better.
            topk: if kernels::HAS_CUDA { 4 } else { 1 },
        }
    }
}

/// Limits of one step apart from its rows, which a server does not set. Each is at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Maximum number of rows that score tokens of prompts: each costs a row of logits over the whole
    /// vocabulary.
    pub scored_rows: usize,
    /// Maximum number of draft rows, for the same reason.
    pub draft_rows: usize,
    /// Maximum number of waiting sequences that are looked at and not admitted.
    pub looks: usize,
}

impl Default for StepLimits {
    fn default() -> Self {
        Self {
            scored_rows: 256,
            draft_rows: 256,
            looks: 64,
        }
    }
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            max_model_len: None,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            max_prompt_wait: Duration::from_millis(100),
            max_waiting: 512,
            max_logprobs: 20,
            no_prefix_caching: false,
            prefix_cache_disk: None,
            prefix_cache_disk_size: 10 << 30,
            spec: SpecLimits::default(),
            acceptance: Acceptance::default(),
            spec_budget: BudgetMode::default(),
            no_cost_cache: false,
            cost_cache: None,
            calibrate: false,
            step_limits: StepLimits::default(),
            max_loras: 0,
            model_name: "model".into(),
            model_identity: String::new(),
        }
    }
}

/// The limits that a request is checked against. All lengths are in tokens.
#[derive(Debug, Clone)]
pub struct RequestLimits {
    /// Maximum length of a sequence, prompt and output together.
    pub max_model_len: usize,
    /// Number of token ids of the model; ids are below it.
    pub vocab_size: usize,
    /// Maximum number of alternatives that a client may ask for with a log-probability. The server checks it; the
    /// engine returns as many as a request asks for.
    pub max_logprobs: usize,
    /// Maximum number of requests in the queue.
    pub max_waiting: usize,
    /// Maximum number of prompt tokens of all sequences of a request.
    pub max_prompt_tokens: usize,
    /// Maximum depth of drafts; 0 = the server does not speculate.
    pub spec_length: usize,
    /// Whether the model has an output layer; without one it serves embeddings only.
    pub generates: bool,
    /// Number of values of an embedding.
    pub embedding_size: usize,
    /// Whether requests may have adapters.
    pub takes_adapters: bool,
}

/// A request on its way to the engine thread.
pub(super) struct Submission {
    pub request: Request,
    pub events: UnboundedSender<Event>,
    /// The tokens of a text that its receiver has ended.
    pub text_tokens: Arc<OnceLock<usize>>,
    pub arrived: Instant,
    /// The right to wait in the queue.
    pub permit: Option<OwnedSemaphorePermit>,
    /// The request that it belongs to.
    pub group: u64,
    /// The cost of what its request has before it, in tokens.
    pub tokens_before: u64,
}

/// A message to the engine thread.
pub(super) enum EngineMessage {
    /// Requests that belong together: all of them are queued, or none.
    Submit(Vec<Submission>),
    /// A flag in [`EngineShared`] has changed: look.
    Wake,
    /// Forget the cached prefixes, then say so.
    ResetPrefixCache(oneshot::Sender<()>),
    /// Let the drafter of this index draft from the next step on.
    UseDrafter(usize),
}

pub(super) struct EngineShared {
    pub limits: RequestLimits,
    pub eos_token_ids: Vec<u32>,
    pub stats: Arc<Stats>,
    pub cache_key: CacheKey,
    /// The number of the next request.
    pub next_group: AtomicU64,
    /// Number of messages that were sent to the thread and that it has not received.
    pub unread: AtomicUsize,
    /// The rights to wait in the queue. A request holds one until it is first admitted, or ends.
    pub permits: Arc<Semaphore>,
    /// Refuses new requests; the thread ends when the accepted ones are done.
    pub draining: AtomicBool,
    /// The thread ends now and drops running requests.
    pub aborting: AtomicBool,
    /// Set when the thread has dropped the models and is about to end: an error unless it was asked to end.
    pub ended: watch::Sender<Option<Result<()>>>,
    /// Taken by who waits for its end.
    pub thread: Mutex<Option<JoinHandle<()>>>,
}

/// Sends requests to the engine thread. Clones share one engine; when the last one is dropped, the
/// engine finishes its requests and ends.
#[derive(Clone)]
pub struct EngineHandle {
    pub(super) sender: Sender<EngineMessage>,
    pub(super) shared: Arc<EngineShared>,
}

impl EngineHandle {
    /// Queues one request. Dropping its events cancels it.
    ///
    /// # Errors
    /// See [`EngineHandle::submit_all`].
    pub fn submit(&self, request: Request) -> Result<Events> {
        Ok(self.submit_all(vec![request])?.remove(0))
    }

    /// Queues all of `requests` or none.
    ///
    /// # Errors
    /// `Request` errors: a field out of range (`Invalid`), a full queue (`QueueFull`), or
    /// `ShuttingDown`. On an error nothing was queued.
    pub fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<Events>> {
        let shared = &*self.shared;
        for request in &requests {
            shared.limits.check(request, "prompt")?;
        }
        if shared.draining.load(Ordering::SeqCst) {
            return Err(self.gone());
        }
        let (count, max) = (requests.len(), shared.limits.max_waiting);
        if count > max {
            return Err(Error::too_many_sequences(count, 1, max));
        }
        let tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
        if tokens > shared.limits.max_prompt_tokens {
            return Err(Error::too_many_prompt_tokens(
                tokens,
                shared.limits.max_prompt_tokens,
            ));
        }
        let full = |_| {
            let waiting = max - shared.permits.available_permits();
            let message = format!(
                "the queue is full: {waiting} requests are waiting, at most {max} may; try again later"
            );
            Error::request(RequestErrorKind::QueueFull, None, message)
        };
        let permits = shared.permits.clone();
        let mut permits = permits.try_acquire_many_owned(count as u32).map_err(full)?;
        if requests.iter().all(|request| request.pooling.is_none()) {
            shared.stats.requests.n.observe(count as f64);
        }
        let arrived = Instant::now();
        let group = shared.next_group.fetch_add(1, Ordering::Relaxed);
        let mut tokens_before = 0;
        let (submissions, receivers): (Vec<_>, Vec<_>) = requests
            .into_iter()
            .map(|request| {
                let (events, receiver) = unbounded_channel();
                let cost = queue_cost(
                    request.prompt.len(),
                    request.max_tokens.unwrap_or(usize::MAX),
                ) as u64;
                let text_tokens = Arc::<OnceLock<usize>>::default();
                let submission = Submission {
                    request,
                    events,
                    text_tokens: text_tokens.clone(),
                    arrived,
                    permit: permits.split(1),
                    group,
                    tokens_before,
                };
                tokens_before += cost;
                (submission, (receiver, text_tokens))
            })
            .unzip();
        self.send(EngineMessage::Submit(submissions))?;
        let events = receivers.into_iter().map(|(receiver, text_tokens)| {
            Events::new(receiver, shared.stats.clone(), text_tokens)
        });
        Ok(events.collect())
    }

    /// Forgets all cached prefixes, of the target and of the drafter, before the next step. Running requests
    /// go on, but nobody will share what they have computed so far.
    ///
    /// # Errors
    /// `ShuttingDown`, or the reason why the thread has ended.
    pub async fn reset_prefix_cache(&self) -> Result<()> {
        let (done, is_done) = oneshot::channel();
        self.send(EngineMessage::ResetPrefixCache(done))?;
        is_done.await.map_err(|_| self.gone())
    }

    /// Lets the drafter of this index draft from the engine's next step on; without it, nothing changes.
    ///
    /// # Errors
    /// `ShuttingDown`, or the reason why the thread has ended.
    pub fn use_drafter(&self, index: usize) -> Result<()> {
        self.send(EngineMessage::UseDrafter(index))
    }

    /// The limits that requests are checked against.
    pub fn limits(&self) -> &RequestLimits {
        &self.shared.limits
    }

    /// The ids that end a text of this model.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.shared.eos_token_ids
    }

    /// The key of the scopes of requests. A later process with the same prefix cache on disk has it, too.
    pub fn cache_key(&self) -> &CacheKey {
        &self.shared.cache_key
    }

    /// Server-wide counters.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.shared.stats
    }

    /// Whether new requests are refused.
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::SeqCst)
    }

    /// Refuses new requests from now on; queued and running ones continue.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::SeqCst);
        // The thread may be idle and asleep. If it has ended, the send fails harmlessly.
        let _ = self.send(EngineMessage::Wake);
    }

    /// Ends the thread after the step in flight; running requests receive `Failed`.
    pub fn abort(&self) {
        self.shared.aborting.store(true, Ordering::SeqCst);
        self.drain();
    }

    /// Ends the thread as [`EngineHandle::abort`] does, and waits for its end, up to `patience`. Returns whether it has
    /// ended; the first call alone tells. A process must not end while the thread uses a device, whose library is
    /// torn down then.
    pub fn join(&self, patience: Duration) -> bool {
        const INTERVAL: Duration = Duration::from_millis(2);
        self.abort();
        let thread = self.shared.thread.lock();
        let Some(thread) = thread.unwrap_or_else(PoisonError::into_inner).take() else {
            return self.has_ended();
        };
        let started = Instant::now();
        while !thread.is_finished() {
            if started.elapsed() >= patience {
                return false;
            }
            std::thread::sleep(INTERVAL);
        }
        // It catches its panics, and tells of them by `ended`.
        thread.join().is_ok()
    }

    /// Whether the thread has ended: after [`EngineHandle::drain`] and the last request, after
    /// [`EngineHandle::abort`], or because it failed.
    pub fn has_ended(&self) -> bool {
        self.shared.ended.borrow().is_some()
    }

    /// Waits for the end of the thread.
    ///
    /// # Errors
    /// `Internal`, with the reason, if the thread ended without being asked to.
    pub async fn ended(&self) -> Result<()> {
        let mut ended = self.shared.ended.subscribe();
        match ended.wait_for(Option::is_some).await {
            Ok(end) => end.clone().unwrap_or(Ok(())),
            // Cannot happen while this handle is alive.
            Err(_) => Ok(()),
        }
    }

    /// Sends a message to the thread.
    fn send(&self, message: EngineMessage) -> Result<()> {
        // Before it is there: the thread that stops for it must not miss it.
        self.shared.unread.fetch_add(1, Ordering::SeqCst);
        self.sender.send(message).map_err(|_| self.gone())
    }

    /// The error for a request that arrives after the end.
    fn gone(&self) -> Error {
        let end = self.shared.ended.borrow().clone();
        end.and_then(Result::err)
            .unwrap_or_else(Error::shutting_down)
    }
}

impl RequestLimits {
    /// Checks a request against the engine's limits; the caller checks the ranges of sampling
    /// fields. `field` is what the caller calls the prompt.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn check(&self, request: &Request, field: &str) -> Result<()> {
        let prompt = request.prompt.len();
        let max = self.max_model_len;
        if request.pooling.is_none() && !self.generates {
            let message = "this model has no output layer (lm_head), so it generates no text: use /v1/embeddings";
            return Err(Error::request(RequestErrorKind::Invalid, None, message));
        }
        if request.adapter.is_some() && !self.takes_adapters {
            return Err(Error::invalid("model", "this server takes no adapters"));
        }
        if request.pooling.is_some() && request.max_tokens != Some(0) {
            return Err(Error::invalid(
                "max_tokens",
                "max_tokens of an embedding must be 0",
            ));
        }
        if prompt == 0 {
            let message = format!("the {field} must have at least one token");
            return Err(Error::invalid(field, message));
        }
        if let Some(&id) = request
            .prompt
            .iter()
            .find(|&&id| id as usize >= self.vocab_size)
        {
            return Err(Error::unknown_token(field, id, self.vocab_size));
        }
        let wanted = prompt.saturating_add(request.max_tokens.unwrap_or(1));
        if wanted > max {
            let (completion, or_completion) = match request.max_tokens {
                Some(0) => ("0".into(), ""),
                Some(tokens) => (tokens.to_string(), " or completion"),
                None => ("at least 1".into(), ""),
            };
            return Err(Error::request(
                RequestErrorKind::ContextLengthExceeded,
                Some(if prompt < max { "max_tokens" } else { field }),
                // OpenAI's wording: clients recognize by it that a shorter prompt may succeed.
                format!(
                    "This model's maximum context length is {max} tokens. However, you requested \
                     {wanted} tokens ({prompt} in the {field}, {completion} in the completion). \
                     Please reduce the length of the {field}{or_completion}."
                ),
            ));
        }
        self.check_params(&request.params)
    }

    /// Checks the ids in `params` and their number, because every step looks at each of them.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn check_params(&self, params: &SamplingParams) -> Result<()> {
        let stop_ids = params.stop_token_ids.iter().copied();
        let biased = params.logit_bias.iter().map(|&(id, _)| id);
        self.check_ids("stop_token_ids", stop_ids, MAX_STOP_TOKEN_IDS)?;
        self.check_ids("logit_bias", biased, MAX_LOGIT_BIASES)?;
        let thought = params.thought.as_ref();
        let closing = thought.map_or(&[][..], |limit| limit.marks.closing());
        let closing = closing.iter().copied();
        self.check_ids("thinking_token_budget", closing, MAX_STOP_TOKEN_IDS)
    }

    fn check_ids(
        &self,
        field: &str,
        mut ids: impl ExactSizeIterator<Item = u32>,
        max: usize,
    ) -> Result<()> {
        let count = ids.len();
        if count > max {
            let message = format!("{field} may have at most {max} entries, not {count}");
            return Err(Error::invalid(field, message));
        }
        match ids.find(|&id| id as usize >= self.vocab_size) {
            Some(id) => Err(Error::unknown_token(field, id, self.vocab_size)),
            None => Ok(()),
        }
    }
}
