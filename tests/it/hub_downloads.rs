//! Downloads from a Hub that break off, or that meet what they cannot use: they end with the whole file, or with one line.

use crate::common::hub::{COMMIT, Hub, hex};
use crate::common::process::{Server, foretoken, refusal_line, stdout_of};
use crate::common::tiny_folder::{byte_level, tiny_folder};
use crate::common::{assert_has, wait_until};
use ring::digest::{SHA256, digest};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tempfile::TempDir;

/// A model that is small and talks.
const FILE: &str = "models/default/foretoken-demo-draft.Q8_0.gguf";
const NAME: &str = "demo-Q8_0.gguf";
/// Less than a third of it, and in the middle of a chunk.
const CUT: usize = 700_003;

fn model() -> Vec<u8> {
    std::fs::read(FILE).unwrap()
}

/// A Hub with the model as `org/demo`, which cuts its bodies off `cuts` times.
fn hub_of(files: &[(&str, &[u8])], cuts: usize, with: Hub) -> (Arc<Hub>, String) {
    let files = files
        .iter()
        .map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec()));
    let hub = Hub {
        files: files.collect(),
        cuts: cuts.into(),
        cut_after: CUT.into(),
        ..with
    };
    hub.start()
}

fn hub(cuts: usize, with: Hub) -> (Arc<Hub>, String) {
    hub_of(&[(&format!("org/demo/{NAME}"), &model())], cuts, with)
}

/// The cache of `org/demo`.
struct Cache {
    home: TempDir,
}

impl Cache {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let cache = Self { home };
        std::fs::create_dir_all(cache.blobs()).unwrap();
        cache
    }

    fn repo(&self) -> PathBuf {
        self.home.path().join("hub/models--org--demo")
    }

    fn blobs(&self) -> PathBuf {
        self.repo().join("blobs")
    }

    /// What an unfinished download of bytes with the etag of `bytes` is called.
    fn part(&self, bytes: &[u8]) -> PathBuf {
        self.blobs().join(format!("{}.incomplete", sha256(bytes)))
    }

    /// The files with contents, whole or not.
    fn contents(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(self.blobs()).unwrap();
        let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        files.retain(|file| file.extension().is_none_or(|end| end != "lock"));
        files
    }

    /// Asserts that it has `bytes` as the model, and nothing else.
    #[track_caller]
    fn assert_has(&self, bytes: &[u8]) {
        let file = self.repo().join("snapshots").join(COMMIT).join(NAME);
        assert!(std::fs::read(file).unwrap() == bytes);
        assert_eq!(self.contents().len(), 1, "{:?}", self.contents());
    }

    fn command(&self, hub: &str) -> Command {
        program(hub, self.home.path())
    }

    /// `foretoken chat org/demo:Q8_0`, with one question.
    fn chat_command(&self, hub: &str) -> Command {
        let mut command = self.command(hub);
        let flags =
            "chat org/demo:Q8_0 --max-tokens 2 --speculative-decoding=false --num-blocks 64";
        command.args(flags.split(' ')).stdin(question());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn chat(&self, hub: &str) -> Output {
        self.chat_command(hub).output().unwrap()
    }

    /// The same, which must end with an answer.
    #[track_caller]
    fn talk(&self, hub: &str) {
        assert!(!stdout_of(&self.chat(hub)).is_empty());
    }

    /// The same, which must end with one line.
    #[track_caller]
    fn refused(&self, hub: &str) -> String {
        refusal_line(&self.chat(hub))
    }
}

fn program(hub: &str, home: &Path) -> Command {
    let mut command = foretoken();
    for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"] {
        command.env_remove(name);
    }
    command.env("HF_HOME", home).env("HF_ENDPOINT", hub);
    command.env("RUST_LOG", "error");
    command
}

fn question() -> std::fs::File {
    use std::io::{Seek, Write};
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"Hello!\n").unwrap();
    file.rewind().unwrap();
    file
}

fn sha256(bytes: &[u8]) -> String {
    hex(digest(&SHA256, bytes).as_ref())
}

/// What `hub` says about its bytes, and sends of them.
type Kind = fn() -> Hub;

const WITH_HASHES: Kind = || Hub {
    hashes: true,
    ..Hub::default()
};
/// Sends whole files only.
const WHOLE: Kind = || Hub {
    hashes: true,
    whole_only: true,
    ..Hub::default()
};

#[test]
fn a_download_that_breaks_off_goes_on() {
    let kinds: [(&str, Kind); 6] = [
        ("lengths", Hub::default),
        ("lengths and hashes", WITH_HASHES),
        ("chunks", || Hub {
            chunked: true,
            ..Hub::default()
        }),
        ("chunks and hashes", || Hub {
            chunked: true,
            hashes: true,
            ..Hub::default()
        }),
        ("whole", WHOLE),
        ("whole in chunks", || Hub {
            chunked: true,
            whole_only: true,
            ..Hub::default()
        }),
    ];
    for (kind, with) in kinds {
        let (cache, (hub, address)) = (Cache::new(), hub(3, with()));
        cache.talk(&address);
        cache.assert_has(&model());
        assert_eq!(hub.cuts.load(Ordering::SeqCst), 0, "{kind}");
        let ranges = hub.ranges.lock().unwrap().len();
        assert_eq!(ranges, if hub.whole_only { 0 } else { 3 }, "{kind}");
        // No byte comes twice, where it need not; chunks have a few more.
        let times = if hub.whole_only { 2 } else { 1 };
        let sent = hub.sent.load(Ordering::SeqCst);
        assert!(sent < times * model().len() * 101 / 100, "{kind}: {sent}");
    }
}

#[test]
fn a_download_that_never_ends_is_given_up_and_kept() {
    let (cache, (hub, address)) = (Cache::new(), hub(1000, WHOLE()));
    let error = cache.refused(&address);
    assert_has(&error, &["the connection broke after 700003 bytes"]);
    assert_has(&error, &["cannot be reached", "is kept for the next try"]);
    assert_eq!(
        std::fs::metadata(cache.part(&model())).unwrap().len(),
        CUT as u64
    );
    // The next process goes on, with a server that can.
    drop(hub);
    let (hub, address) = self::hub(0, WITH_HASHES());
    cache.talk(&address);
    cache.assert_has(&model());
    assert_eq!(*hub.ranges.lock().unwrap(), [format!("bytes={CUT}-")]);
}

#[test]
fn a_process_that_is_killed_leaves_what_the_next_one_goes_on_with() {
    let (cache, (hub, address)) = (Cache::new(), hub(1, WITH_HASHES()));
    hub.stalled.store(true, Ordering::SeqCst);
    let mut child = cache.chat_command(&address).spawn().unwrap();
    let part = cache.part(&model());
    let bytes = || std::fs::metadata(&part).map_or(0, |part| part.len());
    wait_until("bytes arrive", || bytes() >= CUT as u64);
    child.kill().unwrap();
    child.wait().unwrap();
    hub.stalled.store(false, Ordering::SeqCst);
    cache.talk(&address);
    cache.assert_has(&model());
    assert_eq!(*hub.ranges.lock().unwrap(), [format!("bytes={CUT}-")]);
}

/// Nothing but its hash tells whether a file without a length is whole.
#[test]
fn a_file_without_a_length_needs_a_hash() {
    let endless = |hashes| Hub {
        endless: true,
        hashes,
        ..Hub::default()
    };
    let (cache, (_, address)) = (Cache::new(), hub(1, endless(true)));
    cache.talk(&address);
    cache.assert_has(&model());
    let (cache, (_, address)) = (Cache::new(), hub(1, endless(false)));
    let error = cache.refused(&address);
    assert!(error.contains("says neither how large"), "{error}");
    assert!(!cache.repo().join("snapshots").exists());
}

/// What an earlier process left need not be a part of the file.
#[test]
fn stale_parts_do_not_get_into_the_cache() {
    let longer = [model(), b"more".to_vec()].concat();
    let mut damaged = model();
    damaged[1000] ^= 1;
    let parts = [&b"other bytes"[..], &longer, &damaged, &damaged[..CUT]];
    for stale in parts {
        for with in [WITH_HASHES, WHOLE] {
            let (cache, (_, address)) = (Cache::new(), hub(1, with()));
            std::fs::write(cache.part(&model()), stale).unwrap();
            cache.talk(&address);
            cache.assert_has(&model());
        }
    }
    // The server says that it sends other bytes than those asked for.
    let (cache, (hub, address)) = (
        Cache::new(),
        hub(
            1,
            Hub {
                content_range: Some("bytes 5-9/2442304"),
                ..Hub::default()
            },
        ),
    );
    cache.talk(&address);
    cache.assert_has(&model());
    assert_eq!(hub.ranges.lock().unwrap().len(), 1);
}

#[test]
fn a_file_that_is_replaced_meanwhile_comes_whole() {
    let mut same_size = model();
    let last = same_size.len() - 1;
    same_size[last] ^= 1;
    let longer = [model(), vec![0; 64]].concat();
    for later in [same_size, longer] {
        for with in [WITH_HASHES, WHOLE] {
            let new = HashMap::from([(format!("org/demo/{NAME}"), later.clone())]);
            let with = Hub {
                later: new.into(),
                ..with()
            };
            let (cache, (_, address)) = (Cache::new(), hub(1, with));
            cache.talk(&address);
            cache.assert_has(&later);
        }
    }
    // A file of the Hub's own, as large as before.
    let config = br#"{"model_type": "llama"}"#;
    let (one, two) = ([&config[..], b" "].concat(), [b" ", &config[..]].concat());
    let later = HashMap::from([("org/demo/config.json".to_owned(), two.clone())]);
    let with = Hub {
        later: later.into(),
        hashes: true,
        ..Hub::default()
    };
    let (cache, (hub, address)) = (
        Cache::new(),
        hub_of(&[("org/demo/config.json", &one)], 1, with),
    );
    hub.cut_after.store(5, Ordering::SeqCst);
    let output = cache
        .command(&address)
        .args(["--model", "org/demo"])
        .output()
        .unwrap();
    refusal_line(&output);
    let config = cache
        .repo()
        .join("snapshots")
        .join(COMMIT)
        .join("config.json");
    assert_eq!(std::fs::read(config).unwrap(), two);
}

/// A server, or what is between, sends other bytes than it says.
#[test]
fn bytes_that_are_not_those_of_the_hash_are_refused() {
    let names = HashMap::from([("org/demo-etag", "ce013625030ba8dba906f756967f9e9ca394464a")]);
    let with = Hub {
        names,
        ..Hub::default()
    };
    let (_, address) = hub_of(&[("org/demo-etag/config.json", b"{}")], 0, with);
    let home = tempfile::tempdir().unwrap();
    let output = program(&address, home.path())
        .args(["--model", "org/demo-etag"])
        .output();
    let error = refusal_line(&output.unwrap());
    assert_has(
        &error,
        &["the Hub says ce013625030ba8dba906f756967f9e9ca394464a"],
    );
    let repo = home.path().join("hub/models--org--demo-etag");
    assert!(!repo.join("snapshots").exists());
    let blobs = std::fs::read_dir(repo.join("blobs")).unwrap();
    assert!(
        blobs
            .into_iter()
            .all(|file| file.unwrap().path().extension().unwrap() == "lock")
    );
}

#[test]
fn variables_of_which_no_request_can_be_made_are_named() {
    let cache = Cache::new();
    let error = cache.refused("hf-mirror.example");
    assert_has(
        &error,
        &["org/demo", "HF_ENDPOINT, which must be an address"],
    );
    let (_, address) = hub(0, WITH_HASHES());
    let mut command = cache.chat_command(&address);
    let error = refusal_line(&command.env("HF_TOKEN", "a\nb").output().unwrap());
    assert!(error.contains("HF_TOKEN ("), "{error}");
}

/// Windows has another variable for the user's home.
#[cfg(unix)]
#[test]
fn a_variable_may_name_the_users_home() {
    let (cache, (_, address)) = (Cache::new(), hub(0, WITH_HASHES()));
    let mut command = cache.chat_command(&address);
    command.env("HF_HOME", "~").env("HOME", cache.home.path());
    stdout_of(&command.output().unwrap());
    cache.assert_has(&model());
}

/// Uses `/dev/full`, which only Linux has.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_told_in_one_line() {
    let (cache, (_, address)) = (Cache::new(), hub(0, WITH_HASHES()));
    std::os::unix::fs::symlink("/dev/full", cache.part(&model())).unwrap();
    let error = cache.refused(&address);
    assert_has(&error, &["has no room: ", ".incomplete"]);
    assert_has(&error, &["set HF_HUB_CACHE to another folder"]);
    assert!(!cache.repo().join("snapshots").exists());
    // With room it goes on.
    std::fs::remove_file(cache.part(&model())).unwrap();
    cache.talk(&address);
    cache.assert_has(&model());
}

/// Files stand where folders would have to be, because permissions mean nothing to root.
#[test]
fn a_cache_that_cannot_be_written_is_told_or_used_as_it_is() {
    let (_, address) = hub(0, WITH_HASHES());
    let cache = Cache::new();
    std::fs::remove_dir(cache.blobs()).unwrap();
    std::fs::write(cache.blobs(), "no folder").unwrap();
    let error = cache.refused(&address);
    assert!(error.contains("cache cannot be written: "), "{error}");
    assert!(error.contains("blobs"), "{error}");

    // A model that other tools have put there, without files that need not be: nothing has to be written.
    let folder = tiny_folder(byte_level());
    let cache = Cache::new();
    let snapshot = cache.repo().join("snapshots").join(COMMIT);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(cache.repo().join("refs")).unwrap();
    std::fs::write(cache.repo().join("refs/main"), COMMIT).unwrap();
    std::fs::write(cache.repo().join(".no_exist"), "no folder").unwrap();
    let mut files = Vec::new();
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        std::fs::copy(&path, snapshot.join(name)).unwrap();
        files.push((format!("org/demo/{name}"), std::fs::read(&path).unwrap()));
    }
    let files: Vec<_> = files
        .iter()
        .map(|(name, bytes)| (name.as_str(), &bytes[..]))
        .collect();
    let (hub, address) = hub_of(&files, 0, WITH_HASHES());
    let server = Server::spawn(cache.command(&address), "--model org/demo --num-blocks 64");
    assert!(server.get("/v1/models").contains("org/demo"));
    assert!(hub.asked.load(Ordering::SeqCst) > 0);
}

#[test]
fn weights_in_parts_go_on_where_they_broke_too() {
    let folder = tiny_folder(byte_level());
    let mut files = Vec::new();
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        files.push((format!("org/demo/{name}"), std::fs::read(&path).unwrap()));
    }
    let named: Vec<_> = files
        .iter()
        .map(|(name, bytes)| (name.as_str(), &bytes[..]))
        .collect();
    for with in [WITH_HASHES, WHOLE] {
        let (cache, (hub, address)) = (Cache::new(), hub_of(&named, 4, with()));
        hub.cut_after.store(100_001, Ordering::SeqCst);
        let server = Server::spawn(cache.command(&address), "--model org/demo --num-blocks 64");
        assert!(server.get("/v1/models").contains("org/demo"));
        assert_eq!(hub.cuts.load(Ordering::SeqCst), 0);
        for (name, bytes) in &files {
            let name = name.strip_prefix("org/demo/").unwrap();
            let cached = cache.repo().join("snapshots").join(COMMIT).join(name);
            assert!(std::fs::read(cached).unwrap() == *bytes, "{name}");
        }
    }
}

#[test]
fn two_processes_download_a_file_once() {
    let (cache, (hub, address)) = (Cache::new(), hub(3, WITH_HASHES()));
    let children = [(); 2].map(|()| cache.chat_command(&address).spawn().unwrap());
    for child in children {
        assert!(!stdout_of(&child.wait_with_output().unwrap()).is_empty());
    }
    cache.assert_has(&model());
    assert_eq!(hub.sent.load(Ordering::SeqCst), model().len());
}
