//! The listener, the signals and the start-up messages.

use crate::log::LineWriter;
use crate::renewal;
use crate::stdin::StdinEnd;
use foretoken::assembly;
use foretoken::assembly::defaults;
use foretoken::assembly::load::Loaded;
use foretoken::config::{Config, ListenOptions};
use foretoken::error::{Error, Result};
use foretoken::gguf::EMBEDDED;
use foretoken::http::model_router::SERVES;
use foretoken::http::{self, Tls};
use foretoken::otel::Traces;
use foretoken::signals::{self, Interrupt, Terminate};
use foretoken::text::Text;
use std::net::{SocketAddr, ToSocketAddrs};
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::Runtime;

/// What a server has of the machine before it has a model, so that what is wrong with it is told at once.
pub struct Entrance {
    /// Where it will listen.
    pub socket: TcpSocket,
    /// With what clients speak TLS; `None` = without.
    pub tls: Option<Tls>,
}

impl Entrance {
    /// Takes the port, and reads the certificate.
    ///
    /// # Errors
    /// `Setup`, if there is no having them.
    pub fn open(options: &ListenOptions) -> Result<Self> {
        Ok(Self {
            tls: options.tls()?,
            socket: bind(options)?,
        })
    }
}

/// Serves at `entrance` until a signal arrives, or `stdin` ends. Start-up lines go to stdout, all others to `log`, whose dropped
/// lines the metrics count.
pub fn serve(
    config: &Config,
    entrance: Entrance,
    loaded: Loaded,
    log: &LineWriter,
    stdin: StdinEnd,
) -> Result<()> {
    let text = loaded.text.clone().ok_or_else(|| {
        Error::setup(
            "serving needs a tokenizer.json beside config.json; bench --random-prompts does not",
        )
    })?;
    let (sampling, notice) = defaults::of(&config.generation, &loaded.source)?;
    let engine = loaded.engine.clone();
    let runtime = runtime()?;
    let metrics = &engine.stats().registry;
    metrics
        .register(Box::new(log.dropped().clone()))
        .map_err(|e| Error::internal(format!("metrics: {e}")))?;
    let traces = Traces::start(config.otlp_traces_endpoint.as_deref(), metrics)?;
    let thread = |e| Error::setup(format!("cannot start a thread for stdout: {e}"));
    let stdout = LineWriter::new(std::io::stdout()).map_err(thread)?;
    let served = runtime.block_on(async {
        let (listener, address) = listen(&config.http.listen, entrance.socket)?;
        let signals = StopSignals::new()?;
        renewal::follow(entrance.tls.as_ref())?;
        // What the operator did not ask for, the model is made for.
        let embeds = loaded.embeddings.is_some() && config.pooling.is_none()
            || !engine.limits().generates;
        let state = assembly::state(config, loaded, text.clone(), sampling)?;
        let state = state
            .with_observer(traces.observer())
            .with_tls(entrance.tls);
        if EMBEDDED.iter().any(|m| m.name == config.model.name) {
            stdout.line(&format!(
                "{} is a small demonstration model that is part of this program; for a real one, set --model: a Hugging Face id, a folder or a .gguf file",
                config.model.name
            ));
        }
        if engine.limits().generates {
            stdout.line(&notice);
        }
        stdout.line(&startup_line(config, &text, embeds, address));
        stdout.flush();
        let first_signal = signals.first_then(move || {
            tracing::warn!("second signal: aborting the running requests");
            engine.abort();
        });
        warn_if_open(&config.http.listen, address);
        let shutdown = async {
            tokio::select! {
                () = first_signal => {}
                () = stdin.ended() => {}
            }
        };
        http::serve(listener, state, shutdown, config.http.listen.shutdown_timeout).await
    });
    // A thread may still tokenize for a client that is no longer served.
    runtime.shutdown_background();
    traces.shut_down();
    served
}

/// The threads of a server.
pub fn runtime() -> Result<Runtime> {
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    let built = threads.enable_all().build();
    built.map_err(|e| Error::setup(format!("cannot start the runtime: {e}")))
}

/// Accepts clients on `socket` from now on; returns its address, too.
pub fn listen(options: &ListenOptions, socket: TcpSocket) -> Result<(TcpListener, SocketAddr)> {
    let listening = socket.listen(BACKLOG).and_then(|listener| {
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    listening.map_err(|e| cannot_listen(options, &e))
}

/// Warns of a server that everyone on the network can use.
pub fn warn_if_open(http: &ListenOptions, address: SocketAddr) {
    if http.api_key.is_empty() && !address.ip().is_loopback() {
        let host = &http.host;
        tracing::warn!(
            "every machine that reaches {host} can use this server: set --api-key, or --host 127.0.0.1"
        );
    }
}

/// Connections that wait until they are accepted, at most.
const BACKLOG: u32 = 1024;

/// Takes the port before models are loaded, so that a wrong one is told at once. Clients are refused until
/// [`serve`] listens.
///
/// # Errors
/// `Setup`, if the address cannot be taken.
pub fn bind(http: &ListenOptions) -> Result<TcpSocket> {
    let bind = |address: SocketAddr| {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        // A port can be used again at once after a server has ended. On Windows it always can, and this flag would share
        // it with another program.
        socket.set_reuseaddr(cfg!(not(windows)))?;
        socket.bind(address)?;
        Ok(socket)
    };
    let addresses = (http.host.as_str(), http.port).to_socket_addrs();
    let mut tried = addresses.map_err(|e| cannot_listen(http, &e))?.map(bind);
    let none = || Err(std::io::ErrorKind::AddrNotAvailable.into());
    let mut result = tried.next().unwrap_or_else(none);
    while result.is_err()
        && let Some(next) = tried.next()
    {
        result = next;
    }
    result.map_err(|e| cannot_listen(http, &e))
}

fn cannot_listen(http: &ListenOptions, e: &std::io::Error) -> Error {
    let (host, port) = (&http.host, http.port);
    let what = match e.kind() {
        std::io::ErrorKind::AddrInUse => {
            "another program uses this port; choose one with --port".into()
        }
        _ => e.to_string(),
    };
    Error::setup(format!("cannot listen on {host}, port {port}: {what}"))
}

/// The beginning of a server's last line at start, before its address.
pub fn serves(options: &ListenOptions) -> String {
    SERVES.replace("http:", &format!("{}:", scheme(options)))
}

fn scheme(options: &ListenOptions) -> &'static str {
    match options.tls_cert {
        Some(_) => "https",
        None => "http",
    }
}

/// The last start-up line: the address and an example command.
fn startup_line(config: &Config, text: &Text, embeds: bool, mut address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        address = ([127, 0, 0, 1], address.port()).into();
    }
    let generate = ",\"max_tokens\":100,\"temperature\":0";
    let (path, prompt, more) = if embeds {
        ("embeddings", ("input", "The sky is blue.".into()), "")
    } else if text.has_chat_template() {
        let content = "Write a short story about a lonely owl in the snow who waits for the rain.";
        let messages = serde_json::json!([{"role": "user", "content": content}]);
        ("chat/completions", ("messages", messages), generate)
    } else {
        let start = "The sky is blue because".into();
        ("completions", ("prompt", start), generate)
    };
    let model = serde_json::Value::from(config.served_model_name.as_str());
    let key = if config.http.listen.api_key.is_empty() {
        ""
    } else {
        " -H \"Authorization: Bearer $FORETOKEN_API_KEY\""
    };
    let serves = serves(&config.http.listen);
    let scheme = scheme(&config.http.listen);
    format!(
        "{serves}{address} - try: curl {scheme}://{address}/v1/{path} -H 'Content-Type: application/json'{key} -d '{{\"model\":{model},\"{}\":{}{more}}}'",
        prompt.0, prompt.1
    )
}

/// SIGTERM and SIGINT, or what Windows has in their place.
pub struct StopSignals {
    terminate: Terminate,
    interrupt: Interrupt,
}

impl StopSignals {
    /// Installs the handlers; from now on the signals do not end the process.
    pub fn new() -> Result<Self> {
        Ok(Self {
            terminate: signals::terminate()?,
            interrupt: signals::interrupt()?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Completes at the first signal, and calls `second` at a second one. A line of the log says that there may be one.
    pub async fn first_then(mut self, second: impl FnOnce() + Send + 'static) {
        self.next().await;
        tracing::info!("press Ctrl-C again to stop at once");
        tokio::spawn(async move {
            self.next().await;
            second();
        });
    }
}
