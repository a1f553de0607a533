//! The style of all progress bars.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of length `len` on stderr, hidden if stderr is not a terminal. `template` is in indicatif's
/// syntax.
pub fn bar(template: &str, len: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(len).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
