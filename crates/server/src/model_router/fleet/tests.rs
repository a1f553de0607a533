use super::*;
use prometheus::Registry;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A port at which nobody listens.
const NO_PORT: u16 = 9;

/// A fleet of shells with these scripts; their models are called `m0`, `m1` and so on.
pub fn fleet(scripts: &[&str], max_loaded: usize, idle: Option<Duration>) -> Arc<Fleet> {
    fleet_at(NO_PORT, scripts, max_loaded, idle)
}

/// The same, of shells that say that they listen at `port`.
pub fn fleet_at(
    port: u16,
    scripts: &[&str],
    max_loaded: usize,
    idle: Option<Duration>,
) -> Arc<Fleet> {
    let spec = |(number, script): (usize, &&str)| shell(&format!("m{number}"), port, script);
    let specs = scripts.iter().enumerate().map(spec).collect();
    fleet_of(specs, None, max_loaded, idle, Duration::from_secs(60))
}

/// A model whose process is a shell that says that it listens at `port`.
fn shell(name: &str, port: u16, script: &str) -> ModelSpec {
    let listens = format!("echo 'foretoken serves http://127.0.0.1:{port} -'; ");
    ModelSpec {
        name: name.into(),
        adapters: Vec::new(),
        args: vec!["-c".into(), format!("{listens}{script}").into()],
    }
}

fn fleet_of(
    specs: Vec<ModelSpec>,
    source: Option<ModelSource>,
    max_loaded: usize,
    idle: Option<Duration>,
    shutdown_timeout: Duration,
) -> Arc<Fleet> {
    let launcher = Launcher {
        program: "/bin/sh".into(),
        api_keys: Arc::default(),
        log: Arc::new(|_, _| ()),
    };
    let limits = FleetLimits {
        max_loaded,
        idle,
        shutdown_timeout,
    };
    let metrics = FleetMetrics::new(&Registry::new()).unwrap();
    Fleet::new(specs, source, launcher, limits, metrics)
}

fn phase(fleet: &Fleet, model: usize) -> Phase {
    fleet.state(model).phase
}

#[tokio::test]
async fn a_model_takes_the_place_of_another_that_is_not_in_use() {
    let fleet = fleet(&["cat", "cat"], 1, None);
    assert_eq!(fleet.find("m1").await.unwrap(), 1);
    let unknown = fleet.find("m2").await.err().unwrap().to_string();
    assert_eq!(unknown, "the model `m2` does not exist; served: m0, m1");
    let first = fleet.acquire(0).await.unwrap();
    assert_eq!(first.address().port(), NO_PORT);
    let mut second = Box::pin(fleet.acquire(1));
    let waited = timeout(Duration::from_millis(50), &mut second).await;
    assert!(waited.is_err());
    assert_eq!((phase(&fleet, 0), fleet.load()), (Phase::Loaded, 2));
    drop(first);
    let second = second.await.unwrap();
    assert_eq!(phase(&fleet, 0), Phase::Unloaded);
    assert_eq!(phase(&fleet, 1), Phase::Loaded);
    // A client that gives up leaves nothing behind.
    let waited = timeout(Duration::from_millis(10), fleet.acquire(0)).await;
    assert!(waited.is_err());
    drop(second);
    assert_eq!(fleet.load(), 0);
}

#[tokio::test]
async fn a_model_is_loaded_once_and_ahead_of_its_requests() {
    let fleet = fleet(&["cat", "cat"], 1, None);
    assert!(fleet.acquire_loaded(0).await.unwrap().is_none());
    assert_eq!(phase(&fleet, 0), Phase::Unloaded);
    fleet.preload(0);
    fleet.preload(0);
    assert_eq!((phase(&fleet, 0), fleet.load()), (Phase::Loading, 1));
    // It waits, so that the model is loaded after it.
    drop(fleet.acquire(0).await.unwrap());
    fleet.preload(0);
    let lease = fleet.acquire_loaded(0).await.unwrap().unwrap();
    assert_eq!(lease.address().port(), NO_PORT);
    // It is queued behind the other one.
    fleet.preload(1);
    fleet.preload(1);
    let (_, waiting) = fleet.lock().policy.requests();
    assert_eq!(waiting, 1);
    assert!(fleet.acquire_loaded(1).await.unwrap().is_none());
    fleet.unload(1);
    let (_, waiting) = fleet.lock().policy.requests();
    assert_eq!(waiting, 0);
    drop(lease);
    assert_eq!(phase(&fleet, 0), Phase::Loaded);
}

/// Models that come and go, and how often somebody looks for them.
#[derive(Default)]
pub struct Folder {
    names: Mutex<Vec<&'static str>>,
    looks: AtomicUsize,
}

impl Folder {
    pub fn set(&self, names: &[&'static str]) {
        *self.names.lock().unwrap() = names.to_vec();
    }

    /// A fleet of shells, one for each name; `broken` is a folder that cannot be read.
    pub fn fleet(self: &Arc<Self>) -> Arc<Fleet> {
        let folder = self.clone();
        let source: ModelSource = Arc::new(move || {
            folder.looks.fetch_add(1, Ordering::Relaxed);
            let names = folder.names.lock().unwrap();
            if names.contains(&"broken") {
                return Err(Error::setup("broken"));
            }
            Ok(names
                .iter()
                .map(|name| shell(name, NO_PORT, "cat"))
                .collect())
        });
        let specs = source().unwrap();
        self.looks.store(0, Ordering::Relaxed);
        fleet_of(specs, Some(source), 2, None, Duration::from_secs(60))
    }

    /// Sets when somebody looked last.
    async fn looked(fleet: &Fleet, at: Option<Instant>) {
        fleet.refreshed.lock().await.at = at;
    }

    pub fn looks(&self) -> usize {
        self.looks.load(Ordering::Relaxed)
    }
}

#[tokio::test]
async fn models_that_come_are_found_and_those_that_go_end() {
    let folder = Arc::new(Folder::default());
    folder.set(&["a"]);
    let fleet = folder.fleet();
    assert_eq!(fleet.find("a").await.unwrap(), 0);
    assert_eq!(folder.looks(), 0);
    folder.set(&["a", "b"]);
    assert_eq!(fleet.find("b").await.unwrap(), 1);
    let lease = fleet.acquire(1).await.unwrap();
    drop(fleet.acquire(0).await.unwrap());
    // At most once a second.
    folder.set(&["c"]);
    let later = Instant::now() + Duration::from_secs(60);
    Folder::looked(&fleet, Some(later)).await;
    assert!(fleet.find("c").await.is_err());
    assert_eq!(folder.looks(), 1);
    Folder::looked(&fleet, None).await;
    assert_eq!(fleet.find("c").await.unwrap(), 2);
    assert_eq!(folder.looks(), 2);
    let unknown = fleet.find("b").await.err().unwrap().to_string();
    assert_eq!(unknown, "the model `b` does not exist; served: c");
    // It runs until its last request has ended.
    assert_ne!(phase(&fleet, 0), Phase::Loaded);
    assert_eq!(phase(&fleet, 1), Phase::Loaded);
    drop(lease);
    fleet.all_ended().await;
    // What cannot be read changes nothing.
    folder.set(&["broken"]);
    Folder::looked(&fleet, None).await;
    fleet.refresh().await;
    assert_eq!(fleet.catalog.names(), "c");
    folder.set(&["b"]);
    Folder::looked(&fleet, None).await;
    assert_eq!(fleet.find("b").await.unwrap(), 1);
    drop(fleet.acquire(1).await.unwrap());
    assert_eq!(phase(&fleet, 1), Phase::Loaded);
    fleet.shut_down();
    fleet.all_ended().await;
}

#[tokio::test]
async fn a_failure_is_told_with_the_last_lines_of_the_log() {
    let fleet = fleet(&["echo no room >&2; exit 3", "cat"], 2, None);
    // It listens before it fails, so that the request may get it.
    let how = match fleet.acquire(0).await {
        Ok(lease) => lease.failure().await,
        Err(e) => e,
    };
    let expected = "the process of the model `m0` failed: exit code 3: no room";
    assert_eq!(how.to_string(), expected);
    let state = fleet.state(0);
    assert_eq!(state.phase, Phase::Unloaded);
    assert_eq!(state.failure.as_deref(), Some("exit code 3: no room"));
    assert!(fleet.acquire(1).await.is_ok());
}

#[tokio::test]
async fn unused_processes_end_in_time_and_all_at_shutdown() {
    let fleet = fleet(&["cat", "cat"], 2, Some(Duration::from_millis(50)));
    let time = tokio::spawn(fleet.clone().keep_time());
    drop(fleet.acquire(0).await.unwrap());
    fleet.all_ended().await;
    let lease = fleet.acquire(0).await.unwrap();
    fleet.unload(0);
    assert_eq!(phase(&fleet, 0), Phase::Stopping);
    fleet.all_ended().await;
    drop(lease);
    let _lease = fleet.acquire(1).await.unwrap();
    assert!(fleet.ready().is_ok());
    fleet.shut_down();
    assert!(fleet.ready().is_err());
    assert!(fleet.acquire_loaded(1).await.is_err());
    assert!(fleet.acquire(0).await.is_err());
    fleet.all_ended().await;
    time.abort();
}

/// As one that writes its prefix cache to a slow disk.
#[tokio::test]
async fn a_process_may_go_on_for_a_while_after_its_requests() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("written");
    let script = format!("cat; sleep 6; echo all > '{}'", file.display());
    let specs = vec![shell("m0", NO_PORT, &script)];
    let fleet = fleet_of(specs, None, 1, None, Duration::ZERO);
    drop(fleet.acquire(0).await.unwrap());
    fleet.shut_down();
    fleet.all_ended().await;
    assert!(file.exists());
}

#[tokio::test]
async fn processes_that_do_not_end_are_killed() {
    let fleet = fleet(&["exec sleep 1000"], 1, None);
    let _lease = fleet.acquire(0).await.unwrap();
    fleet.shut_down();
    let waited = timeout(Duration::from_millis(50), fleet.all_ended()).await;
    assert!(waited.is_err());
    fleet.abort();
    fleet.all_ended().await;
}
