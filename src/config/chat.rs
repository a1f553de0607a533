//! The flags of `foretoken chat`: with a URL, only those of a client.

use super::Config;
use super::flags::{Cli, CommonOptions};
use crate::chat::Endpoint;
use crate::error::{Error, Result};
use clap::CommandFactory;
use clap::parser::ValueSource;
use std::ffi::OsString;

/// The partner that answers in a chat.
#[derive(Debug, Clone)]
pub enum Partner {
    /// A server that runs already.
    Server(Endpoint),
    /// A model that this process serves, for the chat alone.
    Model(Box<Config>),
}

/// Flags that a chat with a server at a URL knows.
const OF_A_CLIENT: [&str; 6] = [
    "name",
    "model",
    "api_key",
    "system",
    "temperature",
    "max_tokens",
];
/// Flags of a server for others.
const OF_A_SERVER: [&str; 4] = ["host", "port", "exit_on_stdin_end", "otlp_traces_endpoint"];

/// Whether the model is the address of a server.
pub fn is_url(name: &str) -> bool {
    name.starts_with("http://") || name.starts_with("https://")
}

/// Returns the partner that answers to `foretoken chat`, whose command line is `args`, without what a file adds.
///
/// # Errors
/// `Setup`, naming a flag that would have no effect.
pub fn partner(options: CommonOptions, args: &[OsString]) -> Result<Partner> {
    let url = options.name.clone().filter(|name| is_url(name));
    for (id, flag) in given(args) {
        if url.is_some() && !OF_A_CLIENT.contains(&id.as_str()) {
            return Err(Error::setup(format!(
                "{flag} is for a model that chat loads itself: the server at the URL has its own"
            )));
        }
        if url.is_none() && OF_A_SERVER.contains(&id.as_str()) {
            return Err(Error::setup(format!(
                "{flag} is not for chat, which serves a model for itself alone, on a free port: `foretoken serve` serves others"
            )));
        }
    }
    let Some(url) = url else {
        let mut config = options.validate()?;
        config.http.listen.host = "127.0.0.1".into();
        config.http.listen.port = 0;
        config.http.listen.no_ui = true;
        return Ok(Partner::Model(Box::new(config)));
    };
    let mut keys = options.http.listen.api_key.into_iter();
    let key = keys.next();
    if keys.next().is_some() {
        return Err(Error::setup(
            "--api-key is given twice: a chat sends one key",
        ));
    }
    let from_environment = || std::env::var("OPENAI_API_KEY").ok();
    Ok(Partner::Server(Endpoint {
        url,
        api_key: (key.or_else(from_environment)).filter(|key| !key.is_empty()),
        model: options.model,
    }))
}

/// The flags of `args` after `chat`, each with its id.
fn given(args: &[OsString]) -> Vec<(String, String)> {
    let command = Cli::command();
    let matches = command.clone().try_get_matches_from(args).ok();
    let (Some(matches), Some(chat)) = (
        (matches.as_ref()).and_then(|matches| matches.subcommand_matches("chat")),
        command.find_subcommand("chat"),
    ) else {
        return Vec::new();
    };
    let written = chat.get_arguments().filter(|flag| {
        matches.value_source(flag.get_id().as_str()) == Some(ValueSource::CommandLine)
    });
    let named = written.map(|flag| {
        let long = flag.get_long().unwrap_or_default();
        (flag.get_id().to_string(), format!("--{long}"))
    });
    named.collect()
}
