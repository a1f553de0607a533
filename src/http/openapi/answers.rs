//! The shapes of answers. The answers themselves are written piece by piece; tests hold them against these.

#![allow(dead_code, reason = "only their shapes are used")]

use schemars::JsonSchema;
use serde_json::{Map, Value};

/// A list of models.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ModelList {
    object: List,
    data: Vec<Model>,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum List {
    List,
}

/// A name under which the model is served.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Model {
    id: String,
    object: ModelObject,
    /// Seconds since 1970.
    created: u64,
    owned_by: String,
    root: String,
    parent: Option<String>,
    /// Tokens of a prompt and its answer together.
    max_model_len: usize,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum ModelObject {
    Model,
}

/// A completion, or a chunk of one.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Completion {
    id: String,
    object: CompletionObject,
    created: u64,
    model: String,
    system_fingerprint: Option<String>,
    choices: Vec<CompletionChoice>,
    usage: Option<Usage>,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
enum CompletionObject {
    TextCompletion,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct CompletionChoice {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<FinishReason>,
    stop_reason: Option<StopReason>,
    prompt_token_ids: Option<Vec<u32>>,
    token_ids: Option<Vec<u32>>,
    speculation: Option<Vec<Round>>,
}

/// Lists with an entry for each token.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

/// The stop string, or the id of the stop token, that ended the text.
#[derive(JsonSchema)]
#[schemars(untagged)]
enum StopReason {
    Text(String),
    Token(u32),
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ChatCompletion {
    id: String,
    object: ChatObject,
    created: u64,
    model: String,
    system_fingerprint: Option<String>,
    choices: Vec<ChatChoice>,
    usage: Usage,
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(JsonSchema)]
enum ChatObject {
    #[schemars(rename = "chat.completion")]
    Completion,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ChatChoice {
    index: usize,
    message: AssistantMessage,
    logprobs: Option<ChatLogprobs>,
    finish_reason: FinishReason,
    stop_reason: Option<StopReason>,
    token_ids: Option<Vec<u32>>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct AssistantMessage {
    role: AssistantRole,
    content: Option<String>,
    refusal: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum AssistantRole {
    Assistant,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ToolCall {
    id: String,
    #[schemars(rename = "type")]
    kind: FunctionKind,
    function: FunctionCall,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum FunctionKind {
    Function,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct FunctionCall {
    name: String,
    /// JSON text, as the model wrote it.
    arguments: String,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ChatLogprobs {
    content: Vec<TokenLogprob>,
    refusal: Option<Vec<TokenLogprob>>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct TokenLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<TopLogprob>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct TopLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// A chunk of a streamed chat.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ChatCompletionChunk {
    id: String,
    object: ChatChunkObject,
    created: u64,
    model: String,
    system_fingerprint: Option<String>,
    choices: Vec<ChatChunkChoice>,
    usage: Option<Usage>,
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(JsonSchema)]
enum ChatChunkObject {
    #[schemars(rename = "chat.completion.chunk")]
    Chunk,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ChatChunkChoice {
    index: usize,
    delta: Delta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<FinishReason>,
    stop_reason: Option<StopReason>,
    token_ids: Option<Vec<u32>>,
    speculation: Option<Vec<Round>>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Delta {
    role: Option<AssistantRole>,
    content: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<ToolCallDelta>>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ToolCallDelta {
    index: usize,
    id: Option<String>,
    #[schemars(rename = "type")]
    kind: Option<FunctionKind>,
    function: FunctionDelta,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct FunctionDelta {
    name: Option<String>,
    arguments: Option<String>,
}

/// What a round drafted, and the tokens that it added.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Round {
    draft: Vec<DraftToken>,
    tokens: Vec<RoundToken>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct DraftToken {
    token: String,
    /// The place in the draft of the token before.
    parent: Option<usize>,
    source: String,
    accepted: bool,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct RoundToken {
    token: String,
    text: String,
    source: String,
}

/// Tokens of a request, and what speculation did.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: CachedTokens,
    completion_tokens_details: Option<PredictedTokens>,
    speculative_decoding: Option<Speculation>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct CachedTokens {
    cached_tokens: usize,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct PredictedTokens {
    accepted_prediction_tokens: usize,
    rejected_prediction_tokens: usize,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Speculation {
    num_drafts: usize,
    num_draft_tokens: usize,
    num_accepted_tokens: usize,
    acceptance_rate: f64,
    mean_acceptance_length: f64,
}

/// A response. It repeats more of its request than is listed here.
#[derive(JsonSchema)]
pub struct Response {
    id: String,
    object: ResponseObject,
    created_at: u64,
    model: String,
    status: ResponseStatus,
    /// Reasoning, messages and calls, one after the other.
    output: Vec<OutputItem>,
    usage: ResponseUsage,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum ResponseObject {
    Response,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum ResponseStatus {
    Completed,
    Incomplete,
}

#[derive(JsonSchema)]
struct OutputItem {
    id: String,
    #[schemars(rename = "type")]
    kind: OutputKind,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
enum OutputKind {
    Message,
    Reasoning,
    FunctionCall,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ResponseUsage {
    input_tokens: usize,
    input_tokens_details: CachedTokens,
    output_tokens: usize,
    output_tokens_details: ReasoningTokens,
    total_tokens: usize,
    speculative_decoding: Option<Speculation>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ReasoningTokens {
    reasoning_tokens: usize,
}

/// A message in Anthropic's form.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Message {
    id: String,
    #[schemars(rename = "type")]
    kind: MessageKind,
    role: AssistantRole,
    model: String,
    content: Vec<ContentBlock>,
    stop_reason: MessageStop,
    stop_sequence: Option<String>,
    usage: MessageUsage,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum MessageKind {
    Message,
}

#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
enum ContentBlock {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
        signature: String,
    },
    ToolUse {
        id: String,
        name: String,
        input: Map<String, Value>,
    },
}

#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
enum MessageStop {
    EndTurn,
    MaxTokens,
    StopSequence,
    ToolUse,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct MessageUsage {
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
    speculative_decoding: Option<Speculation>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct TokenCount {
    input_tokens: usize,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Tokens {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct DetokenizedText {
    prompt: String,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Health {
    status: HealthStatus,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum HealthStatus {
    Ok,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Version {
    version: String,
}

/// How many requests are being answered.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ServerLoad {
    server_load: usize,
}

/// What is served, and how.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ServerInfo {
    version: String,
    system_fingerprint: Option<String>,
    model_path: String,
    tokenizer_path: String,
    served_model_name: String,
    device: String,
    tp_size: usize,
    dp_size: usize,
    max_model_len: usize,
    max_running_requests: usize,
    max_total_num_tokens: usize,
    /// Sections as in vLLM's configuration.
    vllm_config: Map<String, Value>,
}

/// Names as in `tokenizer_config.json`.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct TokenizerInfo {
    tokenizer_class: String,
    bos_token: Option<String>,
    eos_token: Option<String>,
    pad_token: Option<String>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
    pad_token_id: Option<u32>,
    vocab_size: usize,
    model_max_length: usize,
    clean_up_tokenization_spaces: bool,
    chat_template: Option<String>,
}

/// An error in OpenAI's form.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ErrorBody {
    error: ErrorDetails,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ErrorDetails {
    message: String,
    #[schemars(rename = "type")]
    kind: String,
    /// The field at fault.
    param: Option<String>,
    code: String,
}

/// An error in Anthropic's form.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct MessageError {
    #[schemars(rename = "type")]
    kind: ErrorKind,
    error: MessageErrorDetails,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum ErrorKind {
    Error,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct MessageErrorDetails {
    #[schemars(rename = "type")]
    kind: String,
    message: String,
}
