//! Draft heads whose files are corrupt: as in [`crate::corrupt_files`], for the published layouts of EAGLE, DFlash and Medusa.

use crate::common::process::{foretoken_within, refusal};
use crate::common::tiny::{noise, open};
use crate::common::tiny_folder::{byte_level, tiny_folder};
use crate::corrupt_files::{Dice, cases, corrupt, corrupt_json, survives};
use crate::eagle_head::{Head, LAYOUTS, write_pytorch};
use crate::{head_fixtures, medusa, parallel_head};
use foretoken::error::Error;
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::LoadedModel;
use foretoken::model::{
    Batch, Head as DraftHead, HeadKind, LoadFormat, LoadOptions, ModelSource, PathRows, load_head,
};
use std::path::Path;
use tempfile::TempDir;

/// Loads the head at `path`, if it is one, and runs it on a few of the target's states: what is loaded, drafts.
fn draft(case: u64, path: &Path, target: &dyn LoadedModel) -> bool {
    let source = ModelSource::resolve(path.to_str().unwrap(), None, LoadFormat::Auto);
    let head = survives(case, || {
        let source = source?;
        let kind = HeadKind::of(&source)?;
        let kind = kind.ok_or_else(|| Error::setup("no head"))?;
        load_head(&source, kind, &LoadOptions::default(), target)
    });
    let Some(mut head) = head else {
        return false;
    };
    let hidden = target.config().hidden_size;
    let drafted = survives(case, || run(&mut *head, hidden));
    assert!(
        drafted.is_some(),
        "case {case}: it was loaded, and drafts nothing"
    );
    true
}

fn run(head: &mut dyn DraftHead, hidden: usize) -> Result<(), Error> {
    let mut store = head.new_kv(8, 4)?;
    let (mut blocks, mut table) = (BlockAllocator::new(8, 4), BlockTable::default());
    assert!(blocks.reserve(&mut table, 8).is_ok());
    let states = noise("states", &[3, hidden * head.reads().len()]);
    let mut batch = Batch::default();
    batch.push_span(&[1, 2, 3], &[], 0, &table, 4);
    if let Some(block) = head.masked_block().filter(|_| head.mask_hidden().is_none()) {
        let size = block.size.min(4);
        batch.context_features = Some(head.fuse(&states)?);
        let mut tokens = vec![block.mask; size];
        tokens[0] = 5;
        batch.push_block(&tokens, 3, &table, 4);
        batch.logits = (3..3 + size as u32).collect();
    } else {
        batch.features = Some(head.fuse(&states)?);
        batch.logits = vec![2];
    }
    let output = head.forward(&batch, &mut store)?;
    if let (true, Some(hidden)) = (head.follows_paths(), &output.path_hidden) {
        let tokens = vec![2; hidden.dim(0)?];
        head.follow(&PathRows {
            logits: &output.logits,
            hidden,
            tokens: &tokens,
            level: 1,
            states: None,
        })?;
    }
    Ok(())
}

/// Changes one file of `folder` after the other, each in a place of its first `header` bytes.
fn corrupt_each(folder: &TempDir, salt: u64, header: usize) {
    corrupt_each_beside(&*parallel_head::target().0, folder, salt, header);
}

/// The same of a head of `target`.
fn corrupt_each_beside(target: &dyn LoadedModel, folder: &TempDir, salt: u64, header: usize) {
    let path = folder.path();
    let files: Vec<_> = std::fs::read_dir(path).unwrap().collect();
    let mut files: Vec<_> = files.into_iter().map(|file| file.unwrap().path()).collect();
    files.sort();
    let mut loaded = 0;
    for case in cases(100) {
        let mut dice = Dice(salt << 32 | case);
        let file = &files[dice.roll(files.len())];
        let whole = std::fs::read(file).unwrap();
        let changed = match std::str::from_utf8(&whole) {
            Ok(text) => corrupt_json(text, &mut dice),
            Err(_) => {
                let mut bytes = whole.clone();
                corrupt(&mut bytes, header.min(whole.len()), &mut dice);
                bytes
            }
        };
        std::fs::write(file, changed).unwrap();
        loaded += u64::from(draft(case, path, target));
        std::fs::write(file, whole).unwrap();
    }
    assert!(draft(u64::MAX, path, target), "the files as they were");
    println!("{loaded} of {:?} were loaded", cases(100));
}

#[test]
fn eagle_heads() {
    for (salt, layout) in (1..).zip(LAYOUTS) {
        corrupt_each(&Head::new(layout).write(), salt, 1_500);
    }
}

#[test]
fn parallel_heads() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = parallel_head::head_tensors(true);
    parallel_head::write(folder.path(), &parallel_head::head_config(), &tensors);
    corrupt_each(&folder, 4, 2_000);
}

#[test]
fn medusa_heads() {
    let folder = medusa::folder(&medusa::config(), &medusa::tensors());
    corrupt_each(&folder, 5, usize::MAX);
}

/// Small files that took memory without end, or ended the process by its stack.
#[test]
fn a_pickle_that_grows_is_refused_in_one_line() {
    let model = tiny_folder(byte_level());
    let doubled = [&b")"[..], &b"q\0h\0\x86".repeat(40), b"."].concat();
    let nested = [&b")"[..], &[0x85; 1_000_000], b"."].concat();
    for (pickle, wanted) in [(doubled, "no dict of tensors"), (nested, "262144 objects")] {
        let head = medusa::folder(&medusa::config(), &medusa::tensors());
        let file = head.path().join("medusa_lm_head.pt");
        write_pytorch(&file, &medusa::tensors(), |bytes| *bytes = pickle.clone());
        for arguments in [&["check"][..], &["serve", "--port", "0", "--model"]] {
            let output = foretoken_within(4 << 30)
                .args(arguments)
                .arg(model.path())
                .arg("--draft-model")
                .arg(head.path())
                .output()
                .unwrap();
            let said = refusal(&output);
            let errors: Vec<_> = said
                .lines()
                .filter(|line| !line.contains(" INFO "))
                .collect();
            assert_eq!(errors.len(), 1, "{said}");
            assert!(errors[0].contains(wanted), "{said}");
            assert!(errors[0].contains("medusa_lm_head.pt"), "{said}");
        }
    }
}

#[test]
fn heads_of_the_speculators_library() {
    let target = head_fixtures::target();
    let names = "eagle31 eagle3_latent eagle3_windows peagle_norms dflash2 dflash2_scaled domino \
        domino_specforge lilicorr_narrow dspark_gated dspark_rnn";
    for (salt, name) in (6..).zip(names.split(' ')) {
        let (from, to) = (
            head_fixtures::fixtures().join("heads").join(name),
            tempfile::tempdir(),
        );
        let to = to.unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(from.join(file), to.path().join(file)).unwrap();
        }
        corrupt_each_beside(&*target, &to, salt, 2_000);
    }
}

#[test]
fn assistants_of_gemma_4() {
    let name = "gemma4";
    let target = open(&head_fixtures::fixtures().join("architectures").join(name)).unwrap();
    let from = head_fixtures::fixtures().join("assistants").join(name);
    let copy = head_fixtures::changed_in(&from, &|_| {});
    corrupt_each_beside(&*target, &copy, 17, 2_000);
}
