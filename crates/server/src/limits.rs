//! Limits of what one client may take of the HTTP side: time, memory and connections.

#[cfg(feature = "clap")]
use foretoken_core::parse::{at_least_one, bytes, time_limit};
use std::time::Duration;

/// Limits of connections and request bodies.
#[derive(Debug, Clone)]
#[cfg_attr(
    feature = "clap",
    derive(clap::Args),
    command(next_help_heading = "HTTP")
)]
pub struct HttpLimits {
    /// Maximum size of a request body, in the format of --kv-cache-memory; larger ones are answered 413.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE", default_value = "2MiB", value_parser = bytes))]
    pub max_body_bytes: usize,
    /// Memory for all request bodies together, beyond the first 64 KiB of each; a request that finds
    /// none left is answered 503 [default: 64MiB, or 8 bodies of --max-body-bytes if that is more].
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE", value_parser = bytes))]
    pub max_body_memory: Option<usize>,
    /// Maximum number of open connections; further ones are answered 503 and closed. Each takes a file
    /// descriptor (ulimit -n).
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Self::default().max_connections,
          value_parser = at_least_one))]
    pub max_connections: usize,
    /// Seconds in which a client must have sent the headers of a request, from its first byte, or from
    /// connecting.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value = "10", value_parser = time_limit))]
    pub timeout_headers: Duration,
    /// Seconds in which a client must have sent the body of a request.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value = "60", value_parser = time_limit))]
    pub timeout_body: Duration,
    /// Seconds after which a connection without a request is closed. More than the pools of clients and
    /// proxies wait, so that they do not meet a connection that is just being closed.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value = "75", value_parser = time_limit))]
    pub timeout_keep_alive: Duration,
    /// Seconds after which a client that takes nothing of its reply is disconnected. Streams that wait
    /// for their next token are not affected.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value = "60", value_parser = time_limit))]
    pub timeout_write: Duration,
}

impl HttpLimits {
    /// Bytes for all bodies together, beyond the first ones of each.
    pub(super) fn body_memory(&self) -> usize {
        const MIN: usize = 64 * 1024 * 1024;
        const BODIES: usize = 8;
        let default = MIN.max(self.max_body_bytes.saturating_mul(BODIES));
        self.max_body_memory.unwrap_or(default)
    }
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            max_body_bytes: 2 << 20,
            max_body_memory: None,
            max_connections: 1000,
            timeout_headers: Duration::from_secs(10),
            timeout_body: Duration::from_secs(60),
            timeout_keep_alive: Duration::from_secs(75),
            timeout_write: Duration::from_secs(60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_have_defaults_and_are_checked() {
        let limits = HttpLimits::default();
        assert_eq!(limits.body_memory(), 64 << 20);
        let large = HttpLimits {
            max_body_bytes: 32 << 20,
            ..limits
        };
        assert_eq!(large.body_memory(), 256 << 20);
    }
}
