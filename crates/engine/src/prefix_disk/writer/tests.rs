use super::*;
use foretoken_core::kv::BlockName;

fn entry(number: u8) -> Entry {
    Entry {
        pool: BlockName([1; 16]),
        name: BlockName([number; 16]),
        depth: 0,
    }
}

fn writer(path: &std::path::Path, limit: u64) -> (Arc<Folder>, Writer, Arc<Stats>) {
    let (folder, stats) = (
        Arc::new(Folder::open(path).unwrap()),
        Arc::new(Stats::new("m")),
    );
    let writer = Writer::start(folder.clone(), limit, stats.clone()).unwrap();
    (folder, writer, stats)
}

#[test]
fn what_waits_is_written_before_the_end() {
    let temporary = tempfile::tempdir().unwrap();
    let (folder, writer, stats) = writer(temporary.path(), 1 << 30);
    for number in 0..100 {
        assert!(writer.has_room(1000));
        writer.write(entry(number), None, vec![number; 1000]);
    }
    drop(writer);
    for number in 0..100 {
        assert_eq!(folder.read(&entry(number), 1000).unwrap(), [number; 1000]);
    }
    assert_eq!(stats.prefix_cache_disk_written_bytes.get(), 100_000);
    assert_eq!(stats.prefix_cache_disk_bytes.get(), 100 * 4096);
}

#[test]
fn nothing_is_written_after_what_is_missing() {
    let temporary = tempfile::tempdir().unwrap();
    let (folder, writer, stats) = writer(temporary.path(), 1 << 30);
    writer.write(entry(2), Some(entry(1)), vec![2]);
    writer.write(entry(3), None, vec![3]);
    writer.write(entry(4), Some(entry(3)), vec![4]);
    drop(writer);
    let there = [2, 3, 4].map(|number| folder.has(&entry(number)));
    assert_eq!(there, [false, true, true]);
    assert_eq!(stats.prefix_cache_disk_dropped.get(), 1);
}

#[test]
fn the_files_stay_within_the_limit() {
    let temporary = tempfile::tempdir().unwrap();
    let limit = 10 * 4096;
    let (folder, writer, stats) = writer(temporary.path(), limit);
    for number in 0..50 {
        writer.write(entry(number), None, vec![number; 1000]);
    }
    drop(writer);
    assert!(stats.prefix_cache_disk_bytes.get() <= limit as i64);
    assert!(folder.evict(u64::MAX).unwrap() <= limit);
    assert!(folder.has(&entry(49)), "the youngest is there");
}

/// Where nothing can be written, nothing waits, and nothing fails but the file.
#[test]
fn a_failure_pauses_the_writer() {
    let temporary = tempfile::tempdir().unwrap();
    let (folder, writer, stats) = writer(temporary.path(), 1 << 30);
    // A file where the pool's folder should be.
    let pool = temporary.path().join("01".repeat(16));
    std::fs::write(pool, b"").unwrap();
    writer.write(entry(1), None, vec![1; 10]);
    let patience = Instant::now() + Duration::from_secs(30);
    while writer.has_room(10) && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!writer.has_room(10));
    writer.write(entry(2), None, vec![2; 10]);
    drop(writer);
    assert!(!folder.has(&entry(2)));
    assert_eq!(stats.prefix_cache_disk_dropped.get(), 2);
}
