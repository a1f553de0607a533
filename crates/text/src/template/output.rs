//! A text that grows only up to a limit.

use std::io;

/// Bytes of a prompt, and of a value as JSON. More than any context takes.
pub(super) const MAX_OUTPUT: usize = 64 << 20;

/// The message about a text that would be longer than [`MAX_OUTPUT`].
pub(super) fn too_long() -> String {
    format!("it writes more than {} MiB", MAX_OUTPUT >> 20)
}

/// At most [`MAX_OUTPUT`] bytes that were written; further ones are an error.
#[derive(Default)]
pub(super) struct BoundedOutput(Vec<u8>);

impl BoundedOutput {
    pub(super) fn into_string(self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            return Err(io::Error::other(too_long()));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
