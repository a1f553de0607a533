//! `foretoken router`: the listener, the signals and the log of several models.

use crate::log::LineWriter;
use crate::program;
use crate::renewal;
use crate::serve::{self, Entrance, StopSignals};
use foretoken::config::{LogFormat, RouterConfig};
use foretoken::error::{Error, Result};
use foretoken::http::model_router::{self, ModelLog, ModelSource, RouterOptions};
use prometheus::Registry;
use serde_json::Value;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Serves until a signal arrives. The start-up line goes to stdout, the log of all processes to `log`.
pub fn run(config: &RouterConfig, log: &LineWriter) -> Result<()> {
    let Entrance { socket, tls } = Entrance::open(&config.listen)?;
    let program = program::path()?;
    let registry = Registry::new();
    registry
        .register(Box::new(log.dropped().clone()))
        .map_err(|e| Error::internal(format!("metrics: {e}")))?;
    let listen = &config.listen;
    let options = RouterOptions {
        models: config.models.clone(),
        source: source(config),
        program,
        max_loaded: config.max_loaded,
        idle: config.idle,
        api_keys: listen.api_keys().map(str::to_owned).collect(),
        limits: listen.limits.clone(),
        tls,
        origins: listen.origins.clone(),
        host: listen.host.clone(),
        ui: !listen.no_ui,
        shutdown_timeout: listen.shutdown_timeout,
        log: log_of_models(log.clone(), config.log_format),
        registry,
    };
    let thread = |e| Error::setup(format!("cannot start a thread for stdout: {e}"));
    let stdout = LineWriter::new(std::io::stdout()).map_err(thread)?;
    let runtime = serve::runtime()?;
    let served = runtime.block_on(async {
        let (listener, address) = serve::listen(listen, socket)?;
        let signals = StopSignals::new()?;
        renewal::follow(options.tls.as_ref())?;
        stdout.line(&startup_line(config, address));
        stdout.flush();
        let (abort, aborted) = oneshot::channel::<()>();
        let shutdown = signals.first_then(move || {
            // The router may have ended meanwhile.
            let _ = abort.send(());
        });
        let aborted = async {
            if aborted.await.is_err() {
                // There will be no second signal.
                pending().await
            }
        };
        serve::warn_if_open(listen, address);
        model_router::serve(listener, options, shutdown, aborted).await
    });
    runtime.shutdown_background();
    served
}

/// Reads the folder of models anew; `None` if there is none.
fn source(config: &RouterConfig) -> Option<ModelSource> {
    let list = config.list.clone();
    list.can_change()
        .then(|| Arc::new(move || list.read()) as ModelSource)
}

/// Writes the log lines of processes into that of the router: with the model's name before them, or as their field `model`.
fn log_of_models(log: LineWriter, format: LogFormat) -> ModelLog {
    Arc::new(
        move |model, line| match (format, serde_json::from_str(line)) {
            (LogFormat::Json, Ok(Value::Object(mut fields))) => {
                fields.insert("model".into(), model.into());
                log.line(&Value::Object(fields).to_string());
            }
            _ => log.line(&format!("{model}: {line}")),
        },
    )
}

fn startup_line(config: &RouterConfig, address: SocketAddr) -> String {
    let names: Vec<&str> = config
        .models
        .iter()
        .map(|model| model.name.as_str())
        .collect();
    let (count, names) = (names.len(), names.join(", "));
    let serves = serve::serves(&config.listen);
    format!("{serves}{address} - {count} models, each loaded by the first request for it: {names}")
}
