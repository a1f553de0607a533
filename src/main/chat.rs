//! `foretoken chat MODEL`: a server for one conversation, in the same process.

use crate::choose::{self, Choice, Machine};
use crate::serve;
use foretoken::assembly;
use foretoken::assembly::defaults;
use foretoken::assembly::load;
use foretoken::chat::{self, Endpoint};
use foretoken::config::{Config, UnnamedModel};
use foretoken::error::{Error, Result};
use foretoken::http;
use std::io::{self, IsTerminal};
use std::time::Duration;
use tokio::sync::oneshot;

/// Maximum time for the server to notice that nobody waits for its last answer any more.
const GRACE: Duration = Duration::from_secs(1);

/// Talks to a model that no flag names: on a terminal to the one that is chosen there, else to the one that is part of the
/// program.
///
/// # Errors
/// Those of [`run`], and `Setup` if there is no model.
pub fn run_unnamed(unnamed: &UnnamedModel, options: &chat::ChatOptions) -> Result<()> {
    let is_typed = io::stdin().is_terminal() && io::stderr().is_terminal();
    let choice = if is_typed {
        let (mut typed, mut shown) = (io::stdin().lock(), io::stderr().lock());
        let machine = Machine {
            memory: assembly::free_memory(),
            bandwidth: assembly::cpu_bandwidth(unnamed.load_options()),
        };
        let chosen = choose::model(machine, &mut typed, &mut shown);
        chosen.map_err(|e| Error::setup(format!("cannot ask for a model: {e}")))?
    } else {
        Choice::Demonstration
    };
    let name = match choice {
        Choice::Nothing => return Ok(()),
        Choice::Demonstration => None,
        Choice::Named(name) => Some(name),
    };
    run(&unnamed.named(name)?, options)
}

/// Loads the model, serves it on a loopback port and talks to it.
pub fn run(config: &Config, options: &chat::ChatOptions) -> Result<()> {
    if io::stdin().is_terminal() {
        eprintln!("loading {}", config.served_model_name);
    }
    let socket = serve::bind(&config.http.listen)?;
    let (loaded, _thread) = load::load(config)?;
    let text = loaded.text.clone();
    let text = text.filter(|text| text.has_chat_template() && loaded.engine.limits().generates);
    let text = text.ok_or_else(|| {
        Error::setup(format!(
            "{} is no model for a chat: it has no tokenizer, no chat template or no output layer",
            config.served_model_name
        ))
    })?;
    let (sampling, _) = defaults::of(&config.generation, &loaded.source)?;
    let runtime = serve::runtime()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let (address, server) = runtime.block_on(async {
        let (listener, address) = serve::listen(&config.http.listen, socket)?;
        let state = assembly::state(config, loaded, text, sampling)?;
        let shutdown = async {
            let _ = stopped.await;
        };
        let server = tokio::spawn(http::serve(listener, state, shutdown, GRACE));
        Ok::<_, Error>((address, server))
    })?;
    let endpoint = Endpoint {
        url: format!("http://{address}"),
        api_key: config.http.listen.api_keys().next().map(str::to_owned),
        model: Some(config.served_model_name.clone()),
    };
    let talked = chat::run(&endpoint, options);
    drop(stop);
    let served = runtime.block_on(server);
    runtime.shutdown_background();
    talked.and(served.map_err(|e| Error::internal(format!("the server: {e}")))?)
}
