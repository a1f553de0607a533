//! One error type, sorted by who must act: the caller, the operator, or us.

/// What a caller did wrong, or what keeps us from serving it now. Each kind has one HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestErrorKind {
    /// A field is malformed or out of range (400).
    Invalid,
    /// Prompt and text together do not fit the context (400).
    ContextLengthExceeded,
    /// The bearer token is missing or wrong (401).
    Unauthorized,
    /// The model or the route does not exist (404).
    NotFound,
    /// The route exists, but not for this method (405).
    MethodNotAllowed,
    /// The body is over the limit (413).
    TooLarge,
    /// The waiting queue is full (429).
    QueueFull,
    /// The server is shutting down (503).
    ShuttingDown,
}

/// Everything that can go wrong.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The caller must change the request, or try again later.
    #[error("{message}")]
    Request {
        kind: RequestErrorKind,
        message: String,
        /// The request field at fault, where there is one.
        param: Option<String>,
    },
    /// The operator must change a flag, a file or the machine. One readable line, exit code 2.
    #[error("{0}")]
    Setup(String),
    /// Our fault: a bug, or a device that failed.
    #[error("{0}")]
    Internal(String),
}

/// `Result` with [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A 400 that names `param` and says in `message` what would be accepted.
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self::request(RequestErrorKind::Invalid, Some(param), message)
    }

    /// A caller's error of any kind.
    pub fn request(
        kind: RequestErrorKind,
        param: Option<&str>,
        message: impl Into<String>,
    ) -> Self {
        Self::Request {
            kind,
            message: message.into(),
            param: param.map(str::to_owned),
        }
    }

    /// A 400 about an id in `param` that none of the `vocab_size` tokens has.
    pub fn unknown_token(param: &str, id: u32, vocab_size: usize) -> Self {
        let largest = vocab_size.saturating_sub(1);
        Self::invalid(
            param,
            format!("token id {id} is not in the vocabulary (0 to {largest})"),
        )
    }

    /// A 400 about a request that makes more sequences than the queue holds.
    pub fn too_many_sequences(prompts: usize, n: usize, max: usize) -> Self {
        Self::invalid(
            "prompt",
            format!(
                "one request may make at most {max} sequences, not {prompts} prompts times {n}"
            ),
        )
    }

    /// A 503: no new requests are taken.
    pub fn shutting_down() -> Self {
        let message = "the server is shutting down";
        Self::request(RequestErrorKind::ShuttingDown, None, message)
    }

    /// One line for the operator.
    pub fn setup(message: impl Into<String>) -> Self {
        Self::Setup(message.into())
    }

    /// One line for the operator about a file, the first of `what`: libraries may append backtraces.
    pub fn in_file(file: &std::path::Path, what: impl std::fmt::Display) -> Self {
        let what = what.to_string();
        let line = what.lines().next().unwrap_or_default();
        Self::Setup(format!("{}: {line}", file.display()))
    }

    /// One line for the operator about a tensor that has not the shape that the config asks for.
    pub fn wrong_shape(name: &str, found: &[usize], wanted: &[usize]) -> Self {
        Self::Setup(format!(
            "tensor {name} has shape {found:?}, the config asks for {wanted:?}"
        ))
    }

    /// A failure that is ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::Internal(message.into())
    }
}

/// The first line of an error of candle's, which may append a backtrace.
pub fn first_line(error: &candle_core::Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Self {
        // With RUST_BACKTRACE set candle adds a backtrace, which is not for callers to read.
        match e {
            candle_core::Error::WithBacktrace { inner, .. } => (*inner).into(),
            e => Self::Internal(e.to_string()),
        }
    }
}
