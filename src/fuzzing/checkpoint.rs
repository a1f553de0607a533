//! Whole checkpoints, read as `foretoken check` reads them: only headers and texts.

use crate::error::{Error, Result};
use crate::files;
use crate::gguf::{Excerpt, ExcerptReader, GgufSource};
use crate::model::{
    HeadKind, LoadFormat, LoadOptions, ModelSource, TensorHeaders, embedding_spec, inspect,
    inspect_head, pickle, safetensors_header,
};
use crate::text::Text;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// The start of a GGUF file.
const MAGIC: &[u8] = b"GGUF";
/// The start of the line with the name of a file.
const FILE: &[u8] = b"\n=== ";

/// A reader of `bytes` that fetches them in steps.
pub(super) fn fetched(bytes: &[u8]) -> impl Read + Seek {
    excerpt_reader("model", bytes)
}

fn excerpt_reader(
    name: &str,
    bytes: &[u8],
) -> ExcerptReader<impl FnMut(u64, u64) -> io::Result<Vec<u8>>> {
    let fetch = |from: u64, len: u64| Ok(bytes[from as usize..][..len as usize].to_vec());
    let nothing = Excerpt::new(name, bytes.len() as u64);
    ExcerptReader::new(nothing, u64::MAX, fetch)
}

/// The GGUF files of a model, one after the other.
pub(super) fn gguf_files(bytes: &[u8]) -> Result<()> {
    let mut starts: Vec<usize> = (0..bytes.len())
        .filter(|&at| bytes[at..].starts_with(MAGIC))
        .collect();
    starts.push(bytes.len());
    let parts = starts.windows(2).enumerate().map(|(i, at)| {
        let name = format!("part {i}");
        let mut reader = excerpt_reader(&name, &bytes[at[0]..at[1]]);
        io::copy(&mut reader, &mut io::sink()).map_err(|e| Error::setup(e.to_string()))?;
        Ok(reader.finish().0)
    });
    let parts: Vec<Excerpt> = parts.collect::<Result<_>>()?;
    let gguf = GgufSource::Headers(Arc::new(parts));
    let read = gguf.open().map(drop);
    let text = Text::from_gguf(gguf.clone()).map(drop);
    let sampling = gguf.recommended_sampling().map(drop);
    checked(&ModelSource::Gguf(gguf), None)?;
    read.and(text).and(sampling)
}

/// The files of a folder, each after a line `=== NAME`. Those that are no safetensors are also read as if the
/// safetensors were elsewhere.
pub(super) fn folder(bytes: &[u8]) -> Result<()> {
    let folder = Folder::new().map_err(|e| Error::setup(e.to_string()))?;
    let mut elsewhere = TensorHeaders::new();
    for file in sections(bytes) {
        let Some(end) = file.iter().position(|&byte| byte == b'\n') else {
            continue;
        };
        let (name, content) = (String::from_utf8_lossy(&file[..end]), &file[end + 1..]);
        // The names are ours; what leaves the folder is no matter of this target.
        if files::is_inside(&name) && name.len() < 100 {
            folder
                .write(&name, content)
                .map_err(|e| Error::setup(e.to_string()))?;
        }
        if name.ends_with(".safetensors") {
            // The check of the folder says what is wrong.
            let _ = safetensors_header::read(&mut fetched(content), &mut elsewhere);
        }
    }
    let source = ModelSource::Folder(folder.0.clone());
    // A head has none.
    let text = if folder.0.join("tokenizer.json").exists() {
        Text::from_folder(&folder.0).map(drop)
    } else {
        Ok(())
    };
    let here = checked(&source, None);
    // A pickle is read here only.
    let there = match pickle::file_in(&folder.0) {
        None => checked(&source, Some(elsewhere)),
        Some(_) => Ok(()),
    };
    text.and(here).and(there)
}

/// Does what `check` does: reads the model, or a head beside a model of any shape, and how it embeds.
fn checked(source: &ModelSource, elsewhere: Option<TensorHeaders>) -> Result<()> {
    let tensors = elsewhere.map(Arc::new);
    let kind = HeadKind::of_headers(source, tensors.as_deref())?;
    let options = LoadOptions {
        format: match tensors {
            None => LoadFormat::Auto,
            Some(_) => LoadFormat::Dummy,
        },
        tensors,
        ..LoadOptions::default()
    };
    if let Some(kind) = kind {
        let (target, _) = inspect(&target()?, &dummy())?;
        return inspect_head(source, kind, &options, &*target).map(drop);
    }
    embedding_spec(source, None)?;
    inspect(source, &options).map(drop)
}

/// A model that a head is read beside. Its shape is that of the heads that `fuzz/seeds.py` writes.
fn target() -> Result<ModelSource> {
    static TARGET: OnceLock<Folder> = OnceLock::new();
    let folder = TARGET.get_or_init(|| {
        let folder = Folder::new().expect("there is a folder for temporary files");
        let config =
            br#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 8,
            "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}"#;
        folder
            .write("config.json", config)
            .expect("it can be written to");
        folder
    });
    Ok(ModelSource::Folder(folder.0.clone()))
}

fn dummy() -> LoadOptions {
    LoadOptions {
        format: LoadFormat::Dummy,
        ..LoadOptions::default()
    }
}

/// The parts of `bytes` after each [`FILE`].
fn sections(bytes: &[u8]) -> Vec<&[u8]> {
    let mut starts: Vec<usize> = (0..bytes.len())
        .filter(|&at| bytes[at..].starts_with(FILE))
        .map(|at| at + FILE.len())
        .collect();
    starts.push(bytes.len() + FILE.len());
    starts
        .windows(2)
        .map(|at| &bytes[at[0]..at[1] - FILE.len()])
        .collect()
}

/// A temporary folder.
struct Folder(PathBuf);

impl Folder {
    fn new() -> io::Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("foretoken-fuzz-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder)?;
        Ok(Self(folder))
    }

    /// Writes a file, unless a folder has its name or a file that of its folder.
    fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let file = self.0.join(name);
        let parent = file.parent().unwrap_or(Path::new(""));
        if std::fs::create_dir_all(parent).is_ok() && !file.is_dir() {
            std::fs::write(file, content)?;
        }
        Ok(())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What stays is in the system's folder for temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seeds that `fuzz/seeds.py` writes.
    const SEEDS: [&str; 10] = [
        "llama.gguf",
        "split.gguf",
        "gemma3.gguf",
        "pooling.gguf",
        "llama.folder",
        "shards.folder",
        "embedding.folder",
        "eagle3.folder",
        "medusa.folder",
        "medusa_pt.folder",
    ];

    /// Otherwise a fuzzer would begin with refusals, and hardly find anything behind them.
    #[test]
    fn the_seeds_are_readable() {
        for (name, target) in [
            ("gguf_files", gguf_files as fn(&[u8]) -> Result<()>),
            ("folder", folder),
        ] {
            let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
            let mut count = 0;
            for seed in SEEDS {
                let file = corpus.join(name).join(seed);
                if let Ok(bytes) = std::fs::read(&file) {
                    target(&bytes).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
                    count += 1;
                }
            }
            assert!(count >= 4, "{name}");
        }
    }
}
