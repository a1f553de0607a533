//! `foretoken service install`: a unit of systemd, for this user or for the system.

use crate::program;
use foretoken::config::{Command, Exit, InstallOptions};
use foretoken::console;
use foretoken::error::{Error, Result};
use foretoken::kernels::HAS_CUDA;
use std::path::{Path, PathBuf};

/// The unit of the system, with which deploy/README.md installs by hand, too.
const UNIT: &str = include_str!("../../deploy/systemd/foretoken.service");
/// What the unit runs, which is replaced.
const EXEC: &str =
    "ExecStart=/usr/local/bin/foretoken serve --config /etc/foretoken/foretoken.toml";
/// What forbids a GPU: its driver maps memory that is written and executed, and is reached by devices. With ProtectClock=, no
/// other device than clocks is allowed.
const WITHOUT_GPU: [&str; 3] = ["MemoryDenyWriteExecute", "PrivateDevices", "ProtectClock"];
/// The beginning of a block of the unit that a user's systemd cannot do.
const SYSTEM_ONLY: &str = "# System only";
/// The first line of a unit that may be overwritten.
const MARK: &str = "# Written by `foretoken service install`, which overwrites it. Changes belong in `systemctl edit`.";
/// The model of a configuration for which none is named.
const MODEL: &str = "foretoken-demo";

/// Where the parts of the service are.
struct Places {
    unit: PathBuf,
    config: PathBuf,
    program: PathBuf,
}

/// Writes the unit, and its configuration if it is missing. Starts the service if that is asked for, and otherwise says how
/// it is started.
///
/// # Errors
/// `Setup`: a file cannot be written or is somebody else's, the configuration is wrong, or systemctl fails.
pub fn install(options: &InstallOptions) -> Result<()> {
    if cfg!(not(target_os = "linux")) {
        return Err(Error::setup(
            "service install writes a unit of systemd, which only Linux has: here, let the system's own services run `foretoken serve`",
        ));
    }
    let places = Places::of(options)?;
    console::print(write(options, &places)?)?;
    if !options.now {
        return console::print(next_steps(options.system));
    }
    for args in commands(options.system) {
        console::print(format!("systemctl {}\n", args.join(" ")))?;
        let status = std::process::Command::new("systemctl").args(&args).status();
        let status = status.map_err(|e| Error::setup(format!("cannot run systemctl: {e}")))?;
        if !status.success() {
            return Err(Error::setup(format!(
                "systemctl {} failed ({status})",
                args.join(" ")
            )));
        }
    }
    Ok(())
}

impl Places {
    fn of(options: &InstallOptions) -> Result<Self> {
        let (units, configs) = if options.system {
            ("/etc/systemd/system".into(), "/etc".into())
        } else {
            let configs = user_configs()?;
            (configs.join("systemd/user"), configs)
        };
        let config = match &options.config {
            None => configs.join("foretoken/foretoken.toml"),
            // One that is missing is written.
            Some(file) => std::path::absolute(file).map_err(|e| Error::in_file(file, e))?,
        };
        Ok(Self {
            unit: units.join("foretoken.service"),
            config,
            program: program::path()?,
        })
    }
}

/// The user's folder for configurations.
fn user_configs() -> Result<PathBuf> {
    let set = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let set = set.filter(|folder| folder.is_absolute());
    let home = || Some(std::env::home_dir()?.join(".config"));
    set.or_else(home).ok_or_else(|| {
        Error::setup("there is no home folder: set XDG_CONFIG_HOME, or install with --system")
    })
}

/// Writes both files, and returns what to say of them.
fn write(options: &InstallOptions, places: &Places) -> Result<String> {
    let Places {
        unit,
        config,
        program,
    } = places;
    if options.system
        && let Some(program) = hidden(program)
    {
        let program = program.display();
        return Err(Error::setup(format!(
            "a unit of the system cannot read {program}: copy it with `install -m 755 {program} /usr/local/bin/`, and run /usr/local/bin/foretoken"
        )));
    }
    if options.system {
        let model = options.model.as_deref().map(Path::new);
        let model = model.filter(|model| model.exists());
        let model = model.and_then(|model| std::path::absolute(model).ok());
        for file in model.iter().chain([config]) {
            if let Some(file) = hidden(file) {
                return Err(Error::setup(format!(
                    "a unit of the system cannot read {}: move it, for example to /etc/foretoken or /srv",
                    file.display()
                )));
            }
        }
    }
    // Also what cannot be read, and a link such as that of a masked unit.
    let is_free = match std::fs::symlink_metadata(unit) {
        Ok(found) => {
            let old = std::fs::read_to_string(unit).unwrap_or_default();
            found.is_file() && old.starts_with(MARK)
        }
        Err(e) => e.kind() == std::io::ErrorKind::NotFound,
    };
    if !is_free {
        return Err(Error::setup(format!(
            "{} was not written by this command: remove it first",
            unit.display()
        )));
    }
    let mut said = String::new();
    if !config.exists() {
        let model = options.model.as_deref().unwrap_or(MODEL);
        let folder = config.parent().filter(|folder| !folder.exists());
        write_file(config, &configuration(model)?)?;
        if options.system {
            // The unit's user reads them, whatever the umask of root is.
            let_all_read(folder.into_iter().chain([config.as_path()]))?;
        }
        said = format!("Wrote {}, with the model {model}.\n", config.display());
    } else if options.model.is_some() {
        return Err(Error::setup(format!(
            "{} is there already: change its model, or leave the model out",
            config.display()
        )));
    }
    check(config)?;
    write_file(unit, &unit_text(program, config, options.system)?)?;
    Ok(said + &format!("Wrote {}.\n", unit.display()))
}

/// `file`, or what it leads to by links, if ProtectHome= or PrivateTmp= hides it from a unit of the system.
fn hidden(file: &Path) -> Option<PathBuf> {
    let folders = ["/home", "/root", "/run/user", "/tmp", "/var/tmp"];
    let is_hidden = |path: &PathBuf| folders.iter().any(|folder| path.starts_with(folder));
    let mut paths = std::iter::once(file.to_owned()).chain(file.canonicalize());
    paths.find(is_hidden)
}

/// Lets every user read these files and folders, of which none is secret.
fn let_all_read<'p>(paths: impl Iterator<Item = &'p Path>) -> Result<()> {
    #[cfg(unix)]
    for path in paths {
        use std::os::unix::fs::PermissionsExt;
        let mode = if path.is_dir() { 0o755 } else { 0o644 };
        let set = std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode));
        set.map_err(|e| Error::in_file(path, e))?;
    }
    // Windows has no such units.
    #[cfg(not(unix))]
    let _ = paths;
    Ok(())
}

/// A configuration that serves `model`, which is a path if there is such a file or folder.
fn configuration(model: &str) -> Result<String> {
    let path = Path::new(model);
    let model = if path.exists() {
        let path = std::path::absolute(path).map_err(|e| Error::in_file(path, e))?;
        path.display().to_string()
    } else {
        model.to_owned()
    };
    let model = toml::Value::String(model);
    Ok(format!(
        "# The keys are the long flags of `foretoken serve --help`.\nmodel = {model}\n"
    ))
}

/// Reads the configuration as the service will.
fn check(config: &Path) -> Result<()> {
    let args = ["foretoken", "serve", "--config"].map(std::ffi::OsString::from);
    match Command::from_args(args.into_iter().chain([config.into()])) {
        Err(Exit::Wrong(e)) => Err(e),
        _ => Ok(()),
    }
}

/// `unit` with the right to use a GPU.
fn with_gpu(unit: &str) -> String {
    WITHOUT_GPU.iter().fold(unit.to_owned(), |unit, setting| {
        unit.replace(&format!("\n{setting}=yes\n"), &format!("\n{setting}=no\n"))
    })
}

/// The unit as this program, which may have been built for GPUs, needs it.
fn own_unit() -> String {
    if HAS_CUDA {
        with_gpu(UNIT)
    } else {
        UNIT.to_owned()
    }
}

/// The unit that runs `program` with `config`.
fn unit_text(program: &Path, config: &Path, is_system: bool) -> Result<String> {
    let exec = format!(
        "ExecStart={} serve --config {}",
        // In the program's own path systemd expands no variables.
        word(program)?,
        word(config)?.replace('$', "$$")
    );
    let unit = own_unit();
    let blocks = unit.split("\n\n");
    let blocks = blocks.filter(|block| is_system || !block.starts_with(SYSTEM_ONLY));
    let unit = blocks.collect::<Vec<_>>().join("\n\n");
    let unit = unit.replace(EXEC, &exec);
    let unit = if is_system {
        unit
    } else {
        unit.replace("WantedBy=multi-user.target", "WantedBy=default.target")
    };
    // The comment before it says how the file is installed by hand.
    let lines = unit.lines().skip_while(|line| line.starts_with('#'));
    let lines: Vec<&str> = std::iter::once(MARK).chain(lines).collect();
    Ok(lines.join("\n") + "\n")
}

/// A path as a word of ExecStart=.
fn word(path: &Path) -> Result<String> {
    let text = path
        .to_str()
        .filter(|text| !text.contains(char::is_control));
    let text = text.ok_or_else(|| {
        Error::setup(format!(
            "systemd cannot name {}: it is no plain text",
            path.display()
        ))
    })?;
    let escaped = text.replace('\\', r"\\").replace('"', "\\\"");
    Ok(format!("\"{}\"", escaped.replace('%', "%%")))
}

fn write_file(file: &Path, text: &str) -> Result<()> {
    let written = std::fs::create_dir_all(file.parent().unwrap_or(file))
        .and_then(|()| std::fs::write(file, text));
    written.map_err(|e| match e.kind() {
        std::io::ErrorKind::PermissionDenied => {
            Error::in_file(file, format!("{e} (--system is for root)"))
        }
        _ => Error::in_file(file, e),
    })
}

/// The arguments of systemctl that start the service, also in place of one that runs.
fn commands(is_system: bool) -> Vec<Vec<&'static str>> {
    let user: &[&str] = if is_system { &[] } else { &["--user"] };
    let steps: [&[&str]; 3] = [
        &["daemon-reload"],
        &["enable", "foretoken"],
        &["restart", "foretoken"],
    ];
    steps.map(|step| [user, step].concat()).to_vec()
}

fn next_steps(is_system: bool) -> String {
    let mut said = String::from("To start the service, now and later:\n");
    for args in commands(is_system) {
        said += &format!("  systemctl {}\n", args.join(" "));
    }
    if is_system {
        said + "Its log: journalctl -u foretoken\n"
    } else {
        said + "So that it runs while you are logged out:\n  loginctl enable-linger\nIts log: journalctl --user -u foretoken\n"
    }
}

// Windows has no such paths.
#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn options(model: Option<&str>, system: bool) -> InstallOptions {
        InstallOptions {
            model: model.map(str::to_owned),
            system,
            config: None,
            now: false,
        }
    }

    fn places(folder: &Path) -> Places {
        Places {
            unit: folder.join("units/foretoken.service"),
            config: folder.join("foretoken/foretoken.toml"),
            program: "/opt/fore token/foretoken".into(),
        }
    }

    #[test]
    fn both_units_are_one_text() {
        assert_eq!(UNIT.matches(EXEC).count(), 1);
        let config = Path::new("/etc/100%/f.toml");
        let system = unit_text(Path::new("/usr/bin/foretoken"), config, true).unwrap();
        let exec = "ExecStart=\"/usr/bin/foretoken\" serve --config \"/etc/100%%/f.toml\"\n";
        assert!(
            system.starts_with(&format!("{MARK}\n[Unit]\n")) && system.contains(exec),
            "{system}"
        );
        // All settings of the unit in the repository, but what it runs.
        let settings = |text: &str| -> Vec<String> {
            let lines = text
                .lines()
                .filter(|line| !line.starts_with(['#', 'E']) && !line.is_empty());
            lines.map(str::to_owned).collect()
        };
        let own = settings(&own_unit());
        assert_eq!(settings(&system), own);

        let user = unit_text(Path::new("/usr/bin/foretoken"), config, false).unwrap();
        assert!(
            user.contains(exec) && user.ends_with("WantedBy=default.target\n"),
            "{user}"
        );
        let kept = settings(&user);
        let is_of_both = |line: &String| line == "WantedBy=default.target" || own.contains(line);
        assert!(kept.iter().all(is_of_both), "{user}");
        for section in [
            "[Unit]",
            "[Service]",
            "[Install]",
            "NoNewPrivileges=yes",
            "Restart=on-failure",
        ] {
            assert!(kept.iter().any(|line| line == section), "{section}");
        }
        // A user's systemd has no right to do these.
        for refused in [
            "DynamicUser",
            "CapabilityBoundingSet",
            "ProtectKernel",
            "network-online",
            "HF_HOME",
            "XDG_CACHE_HOME",
        ] {
            assert!(!user.contains(refused), "{refused}");
        }
        // Its own user has no home: what is learned of the machine is kept in the folder that it has.
        let caches =
            "\nEnvironment=HF_HOME=%C/foretoken XDG_CACHE_HOME=%C\nCacheDirectory=foretoken\n";
        assert!(system.contains(caches), "{system}");
    }

    #[test]
    fn a_unit_for_a_gpu_forbids_no_gpu() {
        let unit = with_gpu(UNIT);
        let pairs = UNIT.lines().zip(unit.lines());
        let changed: Vec<_> = pairs.filter(|(old, new)| old != new).collect();
        assert_eq!(
            changed,
            [
                ("MemoryDenyWriteExecute=yes", "MemoryDenyWriteExecute=no"),
                ("PrivateDevices=yes", "PrivateDevices=no"),
                ("ProtectClock=yes", "ProtectClock=no"),
            ]
        );
        assert_eq!(own_unit() == unit, HAS_CUDA);
    }

    #[test]
    fn a_service_is_written_once_and_again() {
        let folder = tempfile::tempdir().unwrap();
        let places = places(folder.path());
        let said = write(&options(Some("qwen3:4b"), false), &places).unwrap();
        assert!(
            said.contains("foretoken.toml, with the model qwen3:4b"),
            "{said}"
        );
        let config = std::fs::read_to_string(&places.config).unwrap();
        assert!(config.ends_with("model = \"qwen3:4b\"\n"), "{config}");
        let unit = std::fs::read_to_string(&places.unit).unwrap();
        assert!(
            unit.contains("\"/opt/fore token/foretoken\" serve"),
            "{unit}"
        );
        // The configuration is the user's from now on; the unit is not.
        std::fs::write(&places.config, "model = \"o/m\"\n").unwrap();
        let said = write(&options(None, false), &places).unwrap();
        assert_eq!(said, format!("Wrote {}.\n", places.unit.display()));
        let refused = |model: Option<&str>, is_system: bool, places: &Places| {
            let error = write(&options(model, is_system), places).unwrap_err();
            assert!(matches!(error, Error::Setup(_)), "{error}");
            error.to_string()
        };
        let error = refused(Some("o/m"), false, &places);
        assert!(error.contains("is there already"), "{error}");
        std::fs::write(&places.config, "modle = \"o/m\"\n").unwrap();
        let error = refused(None, false, &places);
        assert!(error.contains("did you mean `model`"), "{error}");
        std::fs::write(&places.config, "model = \"o/m\"\n").unwrap();
        std::fs::write(&places.unit, "[Unit]\nDescription=mine\n").unwrap();
        let error = refused(None, false, &places);
        assert!(error.contains("was not written by this command"), "{error}");
        let of_cargo = Places {
            program: "/root/.cargo/bin/foretoken".into(),
            ..places
        };
        let error = refused(None, true, &of_cargo);
        assert!(error.contains("/usr/local/bin"), "{error}");
        let unpacked = Places {
            program: "/tmp/foretoken-0.2.0/foretoken".into(),
            ..of_cargo
        };
        let error = refused(None, true, &unpacked);
        assert!(
            error.contains("cannot read /tmp/foretoken-0.2.0"),
            "{error}"
        );
        let of_root = Places {
            program: "/usr/local/bin/foretoken".into(),
            config: "/root/foretoken.toml".into(),
            ..unpacked
        };
        let error = refused(None, true, &of_root);
        assert!(
            error.contains("cannot read /root/foretoken.toml"),
            "{error}"
        );
        // The link of a masked unit.
        std::fs::remove_file(&of_root.unit).unwrap();
        std::os::unix::fs::symlink("/dev/null", &of_root.unit).unwrap();
        let free = Places {
            config: folder.path().join("foretoken/foretoken.toml"),
            ..of_root
        };
        let error = refused(None, false, &free);
        assert!(error.contains("was not written by this command"), "{error}");
    }

    #[test]
    fn links_stay_in_what_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("v1"), folder.path().join("m.gguf"));
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let model = link.display().to_string();
        let config = configuration(&model).unwrap();
        assert!(config.contains(&model), "{config}");

        // But a unit of the system must be able to follow them.
        assert_eq!(hidden(Path::new("/opt/foretoken")), None);
        let home = Path::new("/home/u/foretoken");
        assert_eq!(hidden(home), Some(home.into()));
        if cfg!(target_os = "linux") {
            // A link to `/`.
            let link = Path::new("/proc/self/root/tmp");
            assert_eq!(hidden(link), Some("/tmp".into()));
        }
    }

    #[test]
    fn all_users_read_what_root_has_written() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("foretoken.toml");
        std::fs::write(&file, "").unwrap();
        let set = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        set(&file, 0o600);
        set(folder.path(), 0o700);
        let_all_read([folder.path(), file.as_path()].into_iter()).unwrap();
        let modes = [folder.path(), file.as_path()].map(|path| {
            let permissions = std::fs::metadata(path).unwrap().permissions();
            permissions.mode() & 0o777
        });
        assert_eq!(modes, [0o755, 0o644]);
    }

    #[test]
    fn what_is_run_next_is_told() {
        let said = next_steps(false);
        assert!(
            said.contains("  systemctl --user enable foretoken\n"),
            "{said}"
        );
        assert!(said.contains("loginctl enable-linger"), "{said}");
        let said = next_steps(true);
        assert!(
            said.contains("  systemctl restart foretoken\n") && !said.contains("--user"),
            "{said}"
        );
    }
}
