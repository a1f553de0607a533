use super::*;
use std::sync::Arc;

fn entry(number: u8, depth: usize) -> Entry {
    Entry {
        pool: BlockName([1; 16]),
        name: BlockName([number; 16]),
        depth,
    }
}

fn opened() -> (tempfile::TempDir, Folder) {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    (temporary, folder)
}

#[test]
fn an_entry_is_read_by_another_process_with_the_same_key() {
    let (temporary, first) = opened();
    let second = Folder::open(temporary.path()).unwrap();
    assert_eq!(first.key(), second.key());
    let one = entry(1, 0);
    assert!(second.read(&one, 3).is_none() && !second.has(&one));
    assert_eq!(first.write(&one, b"abc").unwrap(), PAGE);
    assert!(second.has(&one));
    assert_eq!(second.read(&one, 3).unwrap(), b"abc");
    let other = Entry {
        pool: BlockName([2; 16]),
        ..one
    };
    assert!(second.read(&other, 3).is_none());
    let elsewhere = tempfile::tempdir().unwrap();
    assert_ne!(
        Folder::open(elsewhere.path()).unwrap().key(),
        first.key(),
        "no two folders have the same names"
    );
}

/// Two processes write the same entries at the same time: each file is whole whenever it is there.
#[test]
fn two_writers_do_not_harm_each_other() {
    let temporary = tempfile::tempdir().unwrap();
    let contents = Arc::new(vec![7; 100_000]);
    let threads = [(); 2].map(|()| {
        let (path, contents) = (temporary.path().to_owned(), contents.clone());
        std::thread::spawn(move || {
            let folder = Folder::open(&path).unwrap();
            for round in 0..200 {
                let one = entry(round % 5, 0);
                folder.write(&one, &contents).unwrap();
                if let Some(found) = folder.read(&one, contents.len()) {
                    assert_eq!(found, *contents);
                }
                if round % 7 == 0 {
                    folder.evict(0).unwrap();
                }
            }
        })
    });
    for thread in threads {
        thread.join().unwrap();
    }
    let folder = Folder::open(temporary.path()).unwrap();
    folder.evict(0).unwrap();
    assert!(folder.files().unwrap().is_empty());
}

#[test]
#[cfg(unix)]
fn only_its_owner_can_read_what_is_there() {
    use std::os::unix::fs::PermissionsExt;
    let temporary = tempfile::tempdir().unwrap();
    let root = temporary.path().join("new/folder");
    let folder = Folder::open(&root).unwrap();
    folder.write(&entry(1, 0), b"abc").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let file = folder.path(&entry(1, 0));
    assert_eq!((mode(&file), mode(&root.join(KEY))), (0o600, 0o600));
    let part = file.parent().unwrap();
    for folder in [&*root, part, part.parent().unwrap()] {
        assert_eq!(mode(folder), 0o700, "{}", folder.display());
    }
    fs::set_permissions(&root, fs::Permissions::from_mode(0o777)).unwrap();
    let refused = Folder::open(&root).unwrap_err().to_string();
    assert!(refused.contains("other users may write"), "{refused}");
}

#[test]
fn damaged_files_are_removed_and_foreign_ones_stay() {
    let (_temporary, folder) = opened();
    let damages: [fn(&Path); 4] = [
        |path| fs::write(path, b"").unwrap(),
        |path| fs::write(path, b"something else").unwrap(),
        |path| {
            let mut bytes = fs::read(path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(path, bytes).unwrap();
        },
        |path| {
            let bytes = fs::read(path).unwrap();
            fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
        },
    ];
    let one = entry(1, 0);
    for damage in damages {
        folder.write(&one, b"abc").unwrap();
        damage(&folder.path(&one));
        assert!(folder.has(&one));
        assert!(folder.read(&one, 3).is_none());
        assert!(!folder.has(&one), "it is removed");
    }
    // Of another entry, under this name.
    folder.write(&entry(2, 0), b"abc").unwrap();
    fs::rename(folder.path(&entry(2, 0)), folder.path(&one)).unwrap();
    assert!(folder.read(&one, 3).is_none());
    let foreign = [
        folder.root().join("notes.kv"),
        folder.path(&one).with_extension("txt"),
        folder.root().join("ff"),
    ];
    for path in &foreign {
        fs::write(path, b"mine").unwrap();
    }
    assert_eq!(folder.evict(0).unwrap(), 0);
    assert!(foreign.iter().all(|path| path.exists()));
}

#[test]
#[cfg(unix)]
fn links_are_not_followed() {
    let (temporary, folder) = opened();
    let (one, two) = (entry(1, 0), entry(2, 0));
    folder.write(&one, b"abc").unwrap();
    fs::create_dir_all(folder.path(&two).parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(folder.path(&one), folder.path(&two)).unwrap();
    assert!(!folder.has(&two) && folder.read(&two, 3).is_none());
    let outside = temporary.path().join("outside");
    fs::create_dir(&outside).unwrap();
    std::os::unix::fs::symlink(&outside, folder.root().join("0".repeat(32))).unwrap();
    fs::write(outside.join("x.kv"), b"mine").unwrap();
    folder.evict(0).unwrap();
    assert!(outside.join("x.kv").exists());
    assert!(!folder.has(&one));
}

#[test]
fn the_oldest_files_go_first_and_deep_ones_count_as_older() {
    let (_temporary, folder) = opened();
    let all = [0, 100, 200, 300].map(|depth| entry(depth as u8, depth));
    for one in &all {
        folder.write(one, b"abc").unwrap();
    }
    assert_eq!(folder.evict(4 * PAGE).unwrap(), 4 * PAGE);
    // A used file is as young as a new one.
    let used = entry(200, 0);
    folder.touch(&used);
    assert!(folder.evict(3 * PAGE).unwrap() < 3 * PAGE);
    let left = all.map(|one| folder.has(&one));
    assert_eq!(left, [true, false, true, false]);
    assert_eq!(folder.evict(PAGE).unwrap(), 0);
}

#[test]
fn what_cannot_be_a_folder_is_refused_in_one_line() {
    let temporary = tempfile::tempdir().unwrap();
    let file = temporary.path().join("file");
    fs::write(&file, b"").unwrap();
    let mut wrong = vec![file.clone(), file.join("below")];
    if cfg!(unix) {
        wrong.push("/proc/none".into());
    }
    for path in wrong {
        let refused = Folder::open(&path).unwrap_err().to_string();
        assert!(refused.starts_with("--prefix-cache-disk "), "{refused}");
        assert_eq!(refused.lines().count(), 1);
    }
    fs::write(temporary.path().join(KEY), b"short").unwrap();
    let refused = Folder::open(temporary.path()).unwrap_err().to_string();
    assert!(refused.contains("`key`"), "{refused}");
}
