//! One style of progress bars.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of `len` on stderr, hidden where that is no terminal; `template` is indicatif's.
pub fn bar(template: &str, len: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(len).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
