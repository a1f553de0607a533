//! The flags of `foretoken service`.

use clap::{Args, Subcommand};
use std::path::PathBuf;

/// What to do with the service.
#[derive(Debug, Clone, Subcommand)]
pub enum ServiceCommand {
    /// Write a unit that serves, and say how it is started.
    Install(InstallOptions),
}

/// The flags of `foretoken service install`.
#[derive(Debug, Clone, Args)]
pub struct InstallOptions {
    /// The model of a configuration that is written anew, as for --model [default: foretoken-demo].
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// A unit of the system in /etc/systemd/system, instead of one of this user.
    #[arg(long)]
    pub system: bool,
    /// The service's configuration, a TOML file as for serve --config [default: foretoken/foretoken.toml in ~/.config, or in
    /// /etc with --system; it is written if it is missing].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Start the service now and at each start of the machine, or login, with systemctl.
    #[arg(long)]
    pub now: bool,
}
