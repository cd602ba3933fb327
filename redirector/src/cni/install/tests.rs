//! Installing and removing on a real disk, stopped after every operation.

use std::{
    cell::Cell,
    collections::BTreeMap,
    fs::File,
    os::unix::fs::{MetadataExt, PermissionsExt},
};

use serde_json::Value;

use super::*;

const LIST: &str = "{\n  \"cniVersion\": \"1.0.0\",\n  \"name\": \"net\",\n  \"plugins\": [\n    {\"type\": \"bridge\"}\n  ]\n}\n";
const CONF: &str = r#"{"cniVersion":"0.4.0","name":"net","type":"bridge"}"#;
const PROGRAM: &str = "a program";
const NEWER_PROGRAM: &str = "a newer program";

/// A node's two directories, and a plugin to install.
pub(super) struct Node {
    directory: tempfile::TempDir,
    pub(super) config: Config,
}

impl Node {
    pub(super) fn new(mode: Mode) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["net.d", "bin"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("plugin"), PROGRAM).unwrap();
        let config = Config {
            conf_dir: at("net.d"),
            bin_dir: at("bin"),
            plugin: at("plugin"),
            mode,
            entry: Entry {
                agent_socket: Some("/run/redirector/cni.sock".into()),
                ..Entry::default()
            },
        };
        Self { directory, config }
    }

    pub(super) fn write(&self, name: &str, text: &str) {
        fs::write(self.config.conf_dir.join(name), text).unwrap();
    }

    pub(super) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.config.conf_dir.join(name)).unwrap()
    }

    fn install(&self) -> Result<Installed, Error> {
        Installation::new(self.config.clone()).install()
    }

    fn remove(&self) {
        assert_eq!(
            remove(&self.config, Whose::Own).unwrap().left,
            Vec::<PathBuf>::new()
        );
    }

    /// All files, by their paths, with mode and content.
    fn state(&self) -> BTreeMap<PathBuf, (u32, String)> {
        let mut files = BTreeMap::new();
        for directory in [&self.config.conf_dir, &self.config.bin_dir] {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                let mode = fs::metadata(&path).unwrap().mode() & 0o7777;
                let below = path.strip_prefix(self.directory.path()).unwrap().to_owned();
                files.insert(below, (mode, fs::read_to_string(&path).unwrap()));
            }
        }
        files
    }

    /// Panics unless a runtime finds one network here, with our plugin at most once, at the end, and runnable.
    fn check(&self) {
        let mut names: Vec<_> = fs::read_dir(&self.config.conf_dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| {
                [".conf", ".conflist", ".json"]
                    .iter()
                    .any(|ending| name.ends_with(ending))
            })
            .collect();
        names.sort();
        let first = names.first().expect("there is a configuration");
        let text = self.read(first);
        let value: Value =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{first}: {error}: {text}"));
        assert_eq!(value["name"], "net", "{first}");
        let plugins = match first.ends_with(".conflist") {
            true => value["plugins"].as_array().unwrap().clone(),
            false => vec![value],
        };
        let types: Vec<_> = plugins
            .iter()
            .map(|plugin| plugin["type"].as_str().unwrap())
            .collect();
        assert!(
            matches!(types[..], ["bridge"] | ["bridge", TYPE]),
            "{first}: {types:?}"
        );
        if types.contains(&TYPE) {
            let mode = fs::metadata(self.config.binary())
                .expect("the binary is there")
                .permissions()
                .mode();
            assert_eq!(mode & 0o777, 0o755);
            let program = fs::read_to_string(self.config.binary()).unwrap();
            assert!([PROGRAM, NEWER_PROGRAM].contains(&program.as_str()), "{program}");
        }
    }
}

/// The system's disk, but for the time that it takes.
struct Hasty;

impl Disk for Hasty {
    fn sync(&self, _: &File) -> io::Result<()> {
        Ok(())
    }
}

/// A disk on which an installer gets so far and no further, as if it were killed.
struct Mortal<'a> {
    left: Cell<u32>,
    node: &'a Node,
}

impl Mortal<'_> {
    fn live(&self) -> io::Result<()> {
        self.node.check();
        let left = self.left.get().checked_sub(1);
        self.left.set(left.unwrap_or(0));
        left.map(|_| ()).ok_or_else(|| io::Error::other("killed"))
    }
}

impl Disk for Mortal<'_> {
    fn create(&self, path: &Path) -> io::Result<File> {
        self.live()?;
        System.create(path)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        // Half of it is there when the other half is not to come.
        self.live()?;
        System.write(file, &bytes[..bytes.len() / 2])?;
        self.live()?;
        System.write(file, &bytes[bytes.len() / 2..])
    }

    fn set_attributes(&self, file: &File, attributes: Attributes) -> io::Result<()> {
        self.live()?;
        System.set_attributes(file, attributes)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        self.live()?;
        Hasty.sync(file)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.live()?;
        System.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.live()?;
        System.remove(path)
    }
}

fn chained() -> Mode {
    Mode::Chained { file: None }
}

fn owned() -> Mode {
    Mode::Owned {
        copy: "02-redirector.conflist".to_owned(),
        file: None,
    }
}

/// What was before.
type Prepare = fn(&mut Node);

/// What is done to a node, on a disk.
type Act = fn(&Node, &dyn Disk) -> Result<(), Error>;

fn installs(node: &Node, disk: &dyn Disk) -> Result<(), Error> {
    Installation::new(node.config.clone())
        .install_on(disk)
        .map(|_| ())
}

fn removes(node: &Node, disk: &dyn Disk) -> Result<(), Error> {
    remove_on(disk, &node.config, Whose::Own).map(|_| ())
}

#[test]
fn an_installer_may_be_killed_at_every_operation() {
    fn plain(_: &mut Node) {}
    fn installed(node: &mut Node) {
        installs(node, &Hasty).unwrap();
    }
    fn upgraded(node: &mut Node) {
        installs(node, &Hasty).unwrap();
        fs::write(&node.config.plugin, NEWER_PROGRAM).unwrap();
        node.config.entry.exclude_namespaces = vec!["kube-system".to_owned()];
    }
    fn rewritten(node: &mut Node) {
        installs(node, &Hasty).unwrap();
        let saved = |name: &&str| {
            node.config
                .conf_dir
                .join(format!("{name}.redirector-saved"))
                .exists()
        };
        match ["10-net.conf", "10-net.json"].iter().find(|name| saved(name)) {
            Some(name) => node.write(name, CONF),
            None => node.write("10-net.conflist", LIST),
        }
    }
    fn otherwise(node: &mut Node) {
        installs(node, &Hasty).unwrap();
        node.config.mode = match node.config.mode {
            Mode::Owned { .. } => chained(),
            _ => owned(),
        };
    }
    let acts: [(&str, Prepare, Act); 7] = [
        ("install", plain, installs),
        ("install again", installed, installs),
        ("upgrade", upgraded, installs),
        ("repair", rewritten, installs),
        ("another way", otherwise, installs),
        ("remove", installed, removes),
        ("remove after another way", otherwise, removes),
    ];
    let mut kills = 0;
    for (name, text) in [
        ("10-net.conflist", LIST),
        ("10-net.conf", CONF),
        ("10-net.json", CONF),
    ] {
        for mode in [chained(), owned()] {
            for (what, prepare, act) in acts {
                let begin = || {
                    let mut node = Node::new(mode.clone());
                    node.write(name, text);
                    prepare(&mut node);
                    node
                };
                let whole = begin();
                act(&whole, &Hasty).unwrap();
                whole.check();
                for after in 0.. {
                    let node = begin();
                    let left = Cell::new(after);
                    let killed = act(&node, &Mortal { left, node: &node }).is_err();
                    node.check();
                    act(&node, &Hasty)
                        .unwrap_or_else(|error| panic!("{what} of {name} after {after}: {error}"));
                    assert_eq!(node.state(), whole.state(), "{what} of {name} after {after}");
                    if !killed {
                        break;
                    }
                    kills += 1;
                }
            }
        }
    }
    assert!(kills > 300, "{kills}");
}

#[test]
fn installing_twice_changes_nothing_the_second_time() {
    let node = Node::new(chained());
    node.write("10-net.conflist", LIST);
    let mut installation = Installation::new(node.config.clone());
    assert!(installation.install().unwrap().changed);
    let stamp = || Stamp::of(&node.config.conf_dir.join("10-net.conflist")).unwrap();
    let (before, binary) = (stamp(), Stamp::of(&node.config.binary()).unwrap());
    assert!(!installation.install().unwrap().changed);
    assert!(!node.install().unwrap().changed, "by another installer");
    assert_eq!(
        (stamp(), Stamp::of(&node.config.binary()).unwrap()),
        (before, binary)
    );
}

#[test]
fn a_binary_that_is_changed_removed_or_not_executable_is_put_back() {
    let node = Node::new(chained());
    node.write("10-net.conflist", LIST);
    let mut installation = Installation::new(node.config.clone());
    installation.install().unwrap();
    let binary = node.config.binary();
    let harms: [fn(&Path); 4] = [
        |path| fs::remove_file(path).unwrap(),
        |path| fs::write(path, "a programm").unwrap(),
        |path| fs::write(path, "").unwrap(),
        |path| fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap(),
    ];
    for harm in harms {
        harm(&binary);
        assert!(installation.install().unwrap().changed);
        node.check();
    }
}

#[test]
fn the_mode_of_a_configuration_is_kept() {
    let node = Node::new(chained());
    node.write("10-net.conflist", LIST);
    let path = node.config.conf_dir.join("10-net.conflist");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    node.install().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
    node.remove();
    assert_eq!(
        node.state()[Path::new("net.d/10-net.conflist")],
        (0o640, LIST.to_owned())
    );
}

#[test]
fn what_another_agent_needs_stays() {
    let node = Node::new(chained());
    node.write("10-net.conflist", LIST);
    let mut other = node.config.clone();
    other.entry.agent_pod = Some(super::super::entry::AgentPod {
        namespace: "mesh".to_owned(),
        name_prefix: "newer-".to_owned(),
    });
    node.install().unwrap();
    Installation::new(other.clone()).install().unwrap();
    let before = node.state();
    let left = remove(&node.config, Whose::Own).unwrap().left;
    assert_eq!(left, [node.config.conf_dir.join("10-net.conflist")]);
    assert_eq!(node.state(), before);
    other.entry.agent_socket = Some("/elsewhere".into());
    assert_eq!(remove(&other, Whose::Socket).unwrap().left.len(), 1);
    assert_eq!(
        remove(&node.config, Whose::Socket).unwrap().left,
        Vec::<PathBuf>::new()
    );
    assert!(!node.config.binary().exists());
}

#[test]
fn the_plugins_logs_go_with_it() {
    let mut node = Node::new(chained());
    node.write("10-net.conflist", LIST);
    let log = node.directory.path().join("cni.log");
    node.config.entry.log_file = Some(log.clone());
    node.install().unwrap();
    assert!(node.read("10-net.conflist").contains("logFile"));
    let before = node.directory.path().join("cni.log.1");
    let others = node.directory.path().join("cni.log.2");
    for file in [&log, &before, &others] {
        fs::write(file, "").unwrap();
    }
    node.remove();
    assert!(!log.exists() && !before.exists() && others.exists());
}

#[test]
fn one_installer_is_at_work_at_a_time() {
    let node = Node::new(chained());
    node.write("10-net.conflist", LIST);
    let lock = DirectoryLock::take(&node.config.conf_dir).unwrap();
    assert!(matches!(node.install(), Err(Error::Busy(..))));
    assert!(matches!(remove(&node.config, Whose::Own), Err(Error::Busy(..))));
    let later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(lock);
    });
    patiently(|| node.install()).unwrap();
    later.join().unwrap();
}

#[test]
fn what_is_missing_is_named() {
    let node = Node::new(chained());
    node.write("10-net.conflist", LIST);
    for (path, expected) in [
        (node.config.plugin.clone(), "--cni-plugin"),
        (node.config.bin_dir.clone(), "--cni-bin-dir"),
        (node.config.conf_dir.clone(), "--cni-conf-dir"),
    ] {
        let _ = fs::remove_file(&path);
        let _ = fs::remove_dir_all(&path);
        let error = node.install().unwrap_err().to_string();
        assert!(
            error.contains(&path.display().to_string()) && error.contains(expected),
            "{error}"
        );
    }
    // Nothing is there, so nothing is left.
    node.remove();
}
