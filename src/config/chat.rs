//! The flags of `foretoken chat`: with a URL, only those of a client.

use super::flags::{Cli, CommonOptions, LogFormat};
use super::{Config, LoadFlags, refuse_learning};
use crate::chat::{self, Endpoint};
use crate::error::{Error, Result};
use crate::gguf::EMBEDDED;
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
    /// The same, but no flag and no file names the model.
    Unnamed(UnnamedModel),
}

/// The flags of a chat with a model that none of them names.
#[derive(Debug, Clone)]
pub struct UnnamedModel(Box<CommonOptions>);

impl UnnamedModel {
    /// The configuration with the model `name`; `None` = the model that is part of the program.
    ///
    /// # Errors
    /// `Setup`, if a flag does not go with it, or no model is part of the program.
    pub fn named(&self, name: Option<String>) -> Result<Config> {
        let options = CommonOptions {
            name,
            ..(*self.0).clone()
        };
        let config = of_model(options)?;
        refuse_learning(&config)?;
        Ok(config)
    }

    /// The form of the lines on stderr.
    pub fn log_format(&self) -> LogFormat {
        self.0.log_format
    }

    /// How it will be loaded.
    pub fn load_options(&self) -> &LoadFlags {
        &self.0.load
    }
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
const OF_A_SERVER: [&str; 8] = [
    "host",
    "port",
    "tls_cert",
    "tls_key",
    "exit_on_stdin_end",
    "otlp_traces_endpoint",
    "metrics_prefix",
    "max_stored_responses",
];

/// The API key of OpenAI's own clients.
const OPENAI_KEY_VARIABLE: &str = "OPENAI_API_KEY";

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
    let given = given(args);
    for (id, flag) in &given {
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
        if options.name.is_some() || options.model.is_some() {
            return Ok(Partner::Model(Box::new(of_model(options)?)));
        }
        let unnamed = UnnamedModel(Box::new(options));
        // What is wrong is told before somebody chooses.
        if !EMBEDDED.is_empty() {
            unnamed.named(None)?;
        }
        return Ok(Partner::Unnamed(unnamed));
    };
    let mut keys = options.http.listen.api_keys();
    let first = keys.next().map(str::to_owned);
    let is_given = given.iter().any(|(id, _)| id == "api_key");
    if is_given && keys.next().is_some() {
        return Err(Error::setup(
            "--api-key is given twice: a chat sends one key",
        ));
    }
    let api_key = if is_given {
        first
    } else {
        key_of_environment(&url, first, std::env::var(OPENAI_KEY_VARIABLE).ok())
    };
    Ok(Partner::Server(Endpoint {
        url,
        api_key,
        model: options.model,
    }))
}

/// The key for the server at `url`: `ours`, which a server of this machine takes, or that of `openai`, which another is more
/// likely to be meant to see.
fn key_of_environment(url: &str, ours: Option<String>, openai: Option<String>) -> Option<String> {
    let openai = openai.filter(|key| !key.is_empty());
    if chat::is_loopback(url) {
        ours.or(openai)
    } else {
        openai.or(ours)
    }
}

/// The configuration of a server for one chat.
fn of_model(options: CommonOptions) -> Result<Config> {
    let mut config = options.validate()?;
    config.http.listen.host = "127.0.0.1".into();
    config.http.listen.port = 0;
    config.http.listen.no_ui = true;
    Ok(config)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_goes_to_whom_it_is_for() {
        let key = |url: &str, ours: Option<&str>, openai: Option<&str>| {
            key_of_environment(url, ours.map(str::to_owned), openai.map(str::to_owned))
        };
        let (near, far) = ("http://127.0.0.1:8000", "https://api.openai.com/v1");
        assert_eq!(key(near, Some("a"), Some("b")).as_deref(), Some("a"));
        assert_eq!(key(far, Some("a"), Some("b")).as_deref(), Some("b"));
        for url in [near, far] {
            assert_eq!(key(url, Some("a"), Some("")).as_deref(), Some("a"));
            assert_eq!(key(url, None, Some("b")).as_deref(), Some("b"));
            assert_eq!(key(url, None, None), None);
        }
    }
}
