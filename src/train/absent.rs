//! Stands for training in a program that was built without it: its commands are refused.

use crate::error::{Error, Result};
use clap::Args;
use std::ffi::OsString;

/// The arguments of a command that trains.
#[derive(Debug, Clone, Args)]
pub struct DistillOptions {
    /// Nobody reads them.
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<OsString>,
}

/// Refuses the command.
///
/// # Errors
/// `Setup`, always.
pub fn run(_: &DistillOptions) -> Result<()> {
    Err(absent())
}

fn absent() -> Error {
    Error::setup(
        "this program was built without training: build it with cargo build --release --features train",
    )
}

/// Stands for the training of tokenizers.
pub mod tokenizer {
    pub use super::{DistillOptions as TokenizerOptions, run};
}

/// Stands for the head that learns while it serves.
pub mod learn {
    use super::{Result, absent};
    use crate::model::{Head, LoadOptions, LoadedModel, ModelSource};
    use crate::spec::LearnerLink;
    use prometheus::Registry;
    use std::convert::Infallible;
    use std::path::PathBuf;

    /// The options of `--learn`.
    #[derive(Debug, Clone)]
    pub struct LearnOptions {
        /// The folder in which the head would be kept.
        pub folder: PathBuf,
        /// Share of the time of one core.
        pub share: f64,
    }

    impl LearnOptions {
        /// The default share.
        pub const SHARE: f64 = 0.25;

        /// Options with the default share.
        pub fn new(folder: PathBuf) -> Self {
            Self {
                folder,
                share: Self::SHARE,
            }
        }
    }

    /// What `--learn` asks for.
    #[allow(missing_docs, reason = "nothing reads them")]
    pub struct LearnSetup<'a> {
        pub options: &'a LearnOptions,
        pub source: &'a ModelSource,
        pub load: LoadOptions,
        pub target: &'a dyn LoadedModel,
        pub api_key: Option<&'a str>,
    }

    impl LearnSetup<'_> {
        /// Refuses `--learn`.
        ///
        /// # Errors
        /// `Setup`, always.
        pub fn open(self) -> Result<Learning> {
            Err(absent())
        }
    }

    /// A learner; there is none.
    pub struct Learning {
        /// The learned head.
        pub head: Option<Box<dyn Head>>,
        learner: IdleLearner,
    }

    impl Learning {
        /// The parts of a learner.
        pub fn split(self) -> (LearnerLink, IdleLearner) {
            match self.learner.0 {}
        }
    }

    /// A learner that does not run yet; there is none.
    pub struct IdleLearner(Infallible);

    impl IdleLearner {
        /// Starts it.
        ///
        /// # Errors
        /// None.
        pub fn start(self, _: &Registry, _: impl Fn() -> bool + Send + 'static) -> Result<()> {
            match self.0 {}
        }
    }
}
