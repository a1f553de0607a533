//! One error type, whose variants tell who must act: the caller, the operator, or us.

mod field_path;

pub use field_path::FieldPath;

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why a request was refused: the caller's mistake, or why it cannot be served now. Each kind has one
/// HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestErrorKind {
    /// A field is malformed or out of range (400).
    Invalid,
    /// The prompt and the completion together do not fit the context (400).
    ContextLengthExceeded,
    /// The bearer token is missing or wrong (401).
    Unauthorized,
    /// The model or the route does not exist (404).
    NotFound,
    /// The host or the origin of the request is not allowed (403).
    Forbidden,
    /// The route exists, but not for this method (405).
    MethodNotAllowed,
    /// The request did not arrive in time (408).
    Timeout,
    /// The body is over the limit (413).
    TooLarge,
    /// The body is compressed in a way that is not known (415).
    UnsupportedEncoding,
    /// The waiting queue is full (429).
    QueueFull,
    /// There is no memory left for the request (503).
    Overloaded,
    /// The server is shutting down (503).
    ShuttingDown,
    /// The process that serves the model failed or was ended (503).
    ModelUnavailable,
}

/// An error of any part of the program.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The caller must change the request, or try again later.
    #[error("{}{message}", prefix(param.as_ref(), *names_param))]
    Request {
        /// The kind of fault, which gives the HTTP status.
        kind: RequestErrorKind,
        /// What is wrong, without the path of the field.
        message: String,
        /// The request field at fault, if there is one.
        param: Option<FieldPath>,
        /// Whether the path of the field comes before the message.
        names_param: bool,
    },
    /// The operator must change a flag, a file or the machine. One readable line; exit code 2.
    #[error("{0}")]
    Setup(String),
    /// A bug of ours, or a device that failed.
    #[error("{0}")]
    Internal(String),
}

/// `Result` with [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A 400 about `param` that says in `message` what would be accepted.
    pub fn invalid(param: impl Into<FieldPath>, message: impl Into<String>) -> Self {
        Self::Request {
            kind: RequestErrorKind::Invalid,
            message: message.into(),
            param: Some(param.into()),
            names_param: false,
        }
    }

    /// A 400 whose message is the path of `param` and `what`, which begins with a space or a colon.
    pub fn field(param: impl Into<FieldPath>, what: impl Into<String>) -> Self {
        Self::Request {
            kind: RequestErrorKind::Invalid,
            message: what.into(),
            param: Some(param.into()),
            names_param: true,
        }
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
            param: param.map(FieldPath::from),
            names_param: false,
        }
    }

    /// Renames the request field at fault for an API that has other names for fields; see [`FieldPath::renamed`].
    pub fn renamed(mut self, names: &[(&str, &str)]) -> Self {
        if let Self::Request {
            param: Some(path), ..
        } = &mut self
        {
            *path = path.renamed(names);
        }
        self
    }

    /// The path of the request field at fault, as text.
    pub fn param(&self) -> Option<String> {
        match self {
            Self::Request { param, .. } => param.as_ref().map(FieldPath::to_string),
            Self::Setup(_) | Self::Internal(_) => None,
        }
    }

    /// A 400 about an id in `param` that is not below `vocab_size`.
    pub fn unknown_token(param: impl Into<FieldPath>, id: u32, vocab_size: usize) -> Self {
        let largest = vocab_size.saturating_sub(1);
        Self::invalid(
            param,
            format!("token id {id} is not in the vocabulary (0 to {largest})"),
        )
    }

    /// A 400 about a request that makes more sequences than the queue can hold.
    pub fn too_many_sequences(prompts: usize, n: usize, max: usize) -> Self {
        Self::invalid(
            "prompt",
            format!(
                "one request may make at most {max} sequences, not {prompts} prompts times {n}"
            ),
        )
    }

    /// A 400 about a request whose sequences have more prompt tokens than the engine queues for one.
    pub fn too_many_prompt_tokens(tokens: usize, max: usize) -> Self {
        Self::invalid(
            "n",
            format!(
                "the prompts of all sequences of one request (n of each) may have at most {max} tokens, not {tokens}"
            ),
        )
    }

    /// A 503: no new requests are accepted.
    pub fn shutting_down() -> Self {
        let message = "the server is shutting down";
        Self::request(RequestErrorKind::ShuttingDown, None, message)
    }

    /// A setup error: one line for the operator.
    pub fn setup(message: impl Into<String>) -> Self {
        Self::Setup(message.into())
    }

    /// A setup error about a file: one line for the operator, the first of `what`, because libraries
    /// append backtraces.
    pub fn in_file(file: &std::path::Path, what: impl std::fmt::Display) -> Self {
        let what = what.to_string();
        let line = clipped(what.lines().next().unwrap_or_default());
        Self::Setup(format!("{}: {line}", clipped(&file.to_string_lossy())))
    }

    /// A setup error about a tensor whose shape differs from what the config asks for.
    pub fn wrong_shape(name: &str, found: &[usize], wanted: &[usize]) -> Self {
        Self::Setup(format!(
            "tensor {} has shape {found:?}, the config asks for {wanted:?}",
            clipped(name)
        ))
    }

    /// An internal error.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::Internal(message.into())
    }
}

fn prefix(param: Option<&FieldPath>, is_named: bool) -> String {
    let named = param.filter(|_| is_named);
    named.map_or_else(String::new, FieldPath::to_string)
}

/// The beginning of `text` on one line, for messages: names and texts from files and requests can be
/// megabytes long and have control characters.
pub fn clipped(text: &str) -> String {
    const CHARS: usize = 500;
    let one_line = |c: char| if c.is_control() { ' ' } else { c };
    let mut clipped: String = text.chars().take(CHARS).map(one_line).collect();
    if clipped.len() < text.len() {
        clipped.push_str("...");
    }
    clipped
}

/// serde's `message` about a value, in the words of JSON: who wrote the value need not know Rust's names of
/// types.
pub fn json_words(message: &str) -> String {
    const FOUND: [(&str, &str); 9] = [
        ("sequence", "list"),
        ("map", "object"),
        ("floating point", "number"),
        ("unit value", "null"),
        ("Option value", "null"),
        ("newtype variant", "object"),
        ("struct variant", "object"),
        ("tuple variant", "object"),
        ("unit variant", "string"),
    ];
    // The name of a type may follow.
    const KINDS: [(&str, &str); 7] = [
        ("struct ", "an object"),
        ("internally tagged enum ", "an object"),
        ("adjacently tagged enum ", "an object"),
        ("enum ", "a string"),
        ("tuple struct ", "a list"),
        ("unit struct ", "null"),
        ("tuple variant ", "a list"),
    ];
    const WORDS: [(&str, &str); 13] = [
        ("a sequence", "a list"),
        ("a map", "an object"),
        ("map", "an object"),
        ("string or map", "a string"),
        ("unit variant", "a string"),
        ("a borrowed string", "a string"),
        ("unit", "null"),
        ("f32", "a number"),
        ("f64", "a number"),
        ("i32", "an integer"),
        ("i64", "an integer"),
        ("isize", "an integer"),
        ("bool", "a boolean"),
    ];
    const UNSIGNED: [&str; 5] = ["u8", "u16", "u32", "u64", "usize"];

    // What was found may be a text of anything, so that the last place counts.
    let Some((found, expected)) = message.rsplit_once(", expected ") else {
        return message.to_owned();
    };
    // " at line 1 column 2", in messages about files.
    let (expected, place) = match expected.find(" at line ") {
        Some(at) => expected.split_at(at),
        None => (expected, ""),
    };
    let kind = KINDS.iter().find(|(kind, _)| expected.starts_with(kind));
    let word = WORDS.iter().find(|(word, _)| expected == *word);
    let plain = match kind.or(word) {
        Some((_, plain)) => plain,
        None if UNSIGNED.contains(&expected) => "a non-negative integer",
        None => expected,
    };
    // A list with too few fields of a struct.
    let is_short_list = kind.is_some() && found.starts_with("invalid length");
    let found = if is_short_list {
        "invalid type: sequence"
    } else {
        found
    };
    let found = match found.split_once(": ") {
        Some((what, value)) => {
            let word = FOUND.iter().find(|(word, _)| value.starts_with(word));
            let value = match word {
                Some((word, plain)) => format!("{plain}{}", &value[word.len()..]),
                None => value.to_owned(),
            };
            format!("{what}: {value}")
        }
        None => found.to_owned(),
    };
    format!("{found}, expected {plain}{place}")
}

/// Number of calls of [`caught`] that run.
static CATCHING: AtomicUsize = AtomicUsize::new(0);

/// Runs `work`, which hands a file of a stranger to a library. If that panics, the file is broken.
///
/// # Errors
/// Returns the error of `work`. If `work` panics, returns `Setup`, which names `what`.
pub fn caught<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    CATCHING.fetch_add(1, Ordering::Relaxed);
    let result = catch_unwind(AssertUnwindSafe(work));
    CATCHING.fetch_sub(1, Ordering::Relaxed);
    result.unwrap_or_else(|panic| {
        Err(Error::setup(format!(
            "{what} is broken: {}",
            panic_message(&*panic)
        )))
    })
}

thread_local! {
    /// Number of calls of [`caught_here`] that run on this thread.
    static CATCHING_HERE: Cell<usize> = const { Cell::new(0) };
}

/// Runs `work`, which hands what a stranger wrote to a library that stays on this thread.
///
/// # Errors
/// Returns the message of the panic if the library panics.
pub fn caught_here<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    CATCHING_HERE.set(CATCHING_HERE.get() + 1);
    let result = catch_unwind(AssertUnwindSafe(work));
    CATCHING_HERE.set(CATCHING_HERE.get() - 1);
    result.map_err(|panic| panic_message(&*panic))
}

/// The message of a panic, clipped.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or(panic.downcast_ref::<&str>().copied());
    clipped(text.unwrap_or("no message"))
}

/// Whether a panic on this thread is caught, and so needs no report. While [`caught`] runs, those on all
/// threads are, because libraries have their own.
pub fn catching() -> bool {
    CATCHING.load(Ordering::Relaxed) > 0 || CATCHING_HERE.get() > 0
}

/// The first line of a candle error, without the backtrace that may follow.
pub fn first_line(error: &candle_core::Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Self {
        // With RUST_BACKTRACE set, candle adds a backtrace, which callers must not see.
        match e {
            candle_core::Error::WithBacktrace { inner, .. } => (*inner).into(),
            e => Self::Internal(e.to_string()),
        }
    }
}

#[cfg(test)]
mod tests;
