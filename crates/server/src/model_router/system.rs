//! Processes, where Unix and Windows differ.

use std::process::ExitStatus;
use tokio::process::Command;

/// Keeps Ctrl-C from the process that `command` starts: it is for the router, which lets running requests finish.
pub(super) fn without_ctrl_c(command: &mut Command) -> &mut Command {
    #[cfg(unix)]
    {
        command.process_group(0)
    }
    #[cfg(windows)]
    {
        const CREATE_NEW_PROCESS_GROUP: u32 = 0x200;
        command.creation_flags(CREATE_NEW_PROCESS_GROUP)
    }
}

/// How a process ended.
pub(super) fn how(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("signal {signal}");
    }
    match status.code() {
        // What Windows ends a process with is negative, and known by its hexadecimal digits.
        Some(code) if code >= 0 => format!("exit code {code}"),
        _ => status.to_string(),
    }
}
