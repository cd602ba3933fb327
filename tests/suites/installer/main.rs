//! The CNI plugin's installer, by the real program: what a container runtime sees meanwhile, what an agent repairs and how it
//! fights, and what becomes of it all when the agent stops.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use redirector_tests::{
    agent::{Agent, Options, binary},
    app,
    node::Node,
    process::{command, output},
    suite::{Needs, case, main as suite},
    wait,
};

mod leaving;
mod repair;
mod runtime;

use self::runtime::Reader;

/// A list of plugins, as a CNI writes it.
pub(crate) const LIST: &str = "{\n  \"cniVersion\": \"1.0.0\",\n  \"name\": \"net\",\n  \"plugins\": [\n    {\"type\": \"bridge\", \"mtu\": 1.5e3}\n  ]\n}\n";
/// One plugin.
pub(crate) const CONF: &str = "{\"cniVersion\": \"0.4.0\", \"name\": \"net\", \"type\": \"bridge\"}\n";
/// Time for a command.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let mut cases = vec![
        case(
            "a_runtime_always_finds_one_network",
            a_runtime_always_finds_one_network,
        ),
        case("a_killed_installer_is_succeeded", a_killed_installer_is_succeeded),
        case(
            "the_installer_says_what_stands_in_its_way",
            the_installer_says_what_stands_in_its_way,
        ),
        case(
            "an_agent_repairs_what_is_changed",
            repair::an_agent_repairs_what_is_changed,
        ),
        case(
            "an_agent_that_is_fought_does_not_spin",
            repair::an_agent_that_is_fought_does_not_spin,
        ),
        case(
            "a_copy_outlives_the_agent_and_follows_its_original",
            repair::a_copy_outlives_the_agent_and_follows_its_original,
        ),
        case(
            "uninstall_takes_the_plugin_away",
            leaving::uninstall_takes_the_plugin_away,
        ),
    ];
    cases.extend(leaving::cases());
    suite(Needs::Agent, 4, cases)
}

/// The two directories of a CNI.
pub(crate) struct Cni {
    pub(crate) conf: PathBuf,
    pub(crate) bin: PathBuf,
}

impl Cni {
    /// Empty ones below `directory`.
    pub(crate) fn create(directory: &Path) -> Self {
        let cni = Self {
            conf: directory.join("net.d"),
            bin: directory.join("cni-bin"),
        };
        for path in [&cni.conf, &cni.bin] {
            fs::create_dir(path).unwrap();
        }
        cni
    }

    pub(crate) fn arguments(&self) -> Vec<String> {
        let path = |path: &Path| path.display().to_string();
        [
            "--cni-conf-dir".to_owned(),
            path(&self.conf),
            "--cni-bin-dir".to_owned(),
            path(&self.bin),
        ]
        .into()
    }

    /// An agent that keeps the plugin installed.
    pub(crate) fn agent(&self, more: &[&str]) -> Options {
        let more = more.iter().map(|argument| (*argument).to_owned());
        Options {
            arguments: [self.arguments(), vec!["--cni-install".to_owned()]]
                .concat()
                .into_iter()
                .chain(more)
                .collect(),
            ..Options::default()
        }
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.conf.join(name), text).unwrap();
    }

    /// Writes a file as its owner does who cares: at once.
    pub(crate) fn replace(&self, name: &str, text: &str) {
        let (new, path) = (self.conf.join(format!("{name}.new")), self.conf.join(name));
        fs::write(&new, text).unwrap();
        fs::rename(new, path).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.conf.join(name)).unwrap_or_default()
    }

    /// Names of all files in both directories.
    pub(crate) fn names(&self) -> Vec<String> {
        let of = |path: &Path| -> Vec<String> {
            let entries = fs::read_dir(path).unwrap();
            entries
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect()
        };
        let mut names = [of(&self.conf), of(&self.bin)].concat();
        names.sort();
        names
    }

    pub(crate) fn has_binary(&self) -> bool {
        self.bin.join("redirector-cni").exists()
    }

    /// Whether the container runtime calls our plugin, once, after the CNI's own.
    pub(crate) fn is_chained(&self) -> bool {
        runtime::network(&self.conf).is_ok_and(|plugins| plugins == ["bridge", "redirector-cni"])
    }

    /// Runs `redirector install-cni` in a node's namespace.
    fn install(&self, node: &Node, more: &[&str]) -> (bool, String) {
        let mut install = command(&node.host.ns, binary().expect("the suite needs it"));
        install.arg("install-cni").args(self.arguments()).args(more);
        let (status, text) = output(&mut install, DEADLINE);
        (status.success(), text)
    }
}

/// Installs, installs again, removes, and its owner writes it again, with every form of configuration: whoever looks a thousand
/// times a second finds one network, and at the end everything is as it was.
fn a_runtime_always_finds_one_network() {
    let node = Node::new();
    for (at, (name, text, more)) in [
        ("10-net.conflist", LIST, &[][..]),
        ("10-net.conf", CONF, &[]),
        ("10-net.json", CONF, &[]),
        ("10-net.conf", CONF, &["--cni-owned-config"]),
        ("10-net.conflist", LIST, &["--cni-chained=false"]),
    ]
    .into_iter()
    .enumerate()
    {
        let directory = node.directory().join(format!("runtime-{at}"));
        fs::create_dir(&directory).unwrap();
        let cni = Cni::create(&directory);
        cni.write(name, text);
        let reader = Reader::start(&cni.conf);
        for _ in 0..4 {
            for (arguments, removes) in [
                (&[][..], false),
                (&["--exclude-namespaces=a,b"], false),
                (&["--remove"], true),
            ] {
                let (ended, said) = cni.install(&node, &[more, arguments].concat());
                assert!(ended, "{said}");
                let chained = cni.is_chained();
                let wanted = !removes && !more.contains(&"--cni-chained=false");
                assert_eq!(
                    chained,
                    wanted,
                    "{name} {more:?} {arguments:?}: {:?}",
                    cni.names()
                );
                assert_eq!(cni.has_binary(), !removes);
                if !removes {
                    cni.replace(name, text);
                }
            }
        }
        let looks = reader.end();
        assert!(looks > 100, "{looks} looks");
        assert_eq!(cni.names(), [name]);
        assert_eq!(cni.read(name), text);
    }
}

/// The program is killed wherever it is, again and again: a runtime finds one network at any time, and the next run to the end leaves
/// what a run without kills does.
fn a_killed_installer_is_succeeded() {
    const KILLS: u32 = 60;
    let node = Node::new();
    let cni = Cni::create(node.directory());
    cni.write("10-net.conf", CONF);
    let plugin = node.directory().join("plugin");
    fs::write(&plugin, vec![b'x'; 4 << 20]).unwrap();
    let plugin = format!("--cni-plugin={}", plugin.display());
    let reader = Reader::start(&cni.conf);
    let began = std::time::Instant::now();
    assert!(cni.install(&node, &[&plugin]).0);
    let whole = began.elapsed();
    let installed = cni.names();
    assert_eq!(
        installed,
        [
            "10-net.conf.redirector-saved",
            "10-net.conflist",
            "redirector-cni"
        ]
    );
    for kill in 0..KILLS {
        let removes = kill % 2 == 0;
        let mut install = Command::new(binary().expect("the suite needs it"));
        install
            .arg("install-cni")
            .args(cni.arguments())
            .arg(&plugin)
            .stdout(Stdio::null());
        let mut child = install.args(removes.then_some("--remove")).spawn().unwrap();
        std::thread::sleep(whole * kill / KILLS);
        let _ = child.kill();
        child.wait().unwrap();
        assert!(!wait::interrupted());
        if kill % 10 == 9 {
            assert!(cni.install(&node, &[&plugin]).0);
            assert_eq!(cni.names(), installed, "after {kill} kills");
            assert!(cni.is_chained());
        }
    }
    let (ended, said) = cni.install(&node, &["--remove"]);
    assert!(ended, "{said}");
    assert_eq!(cni.names(), ["10-net.conf"]);
    assert_eq!(cni.read("10-net.conf"), CONF);
    reader.end();
}

fn the_installer_says_what_stands_in_its_way() {
    let node = Node::new();
    let cni = Cni::create(node.directory());
    let fails_in = |cni: &Cni, more: &[&str], expected: &str| {
        let (ended, said) = cni.install(&node, more);
        let is_one_line = said.lines().count() == 1;
        assert!(
            !ended && said.contains(expected) && is_one_line,
            "{more:?}: {said}"
        );
    };
    let fails = |more: &[&str], expected: &str| fails_in(&cni, more, expected);
    fails(&[], "there is no CNI configuration yet");
    cni.write("10-net.conflist", LIST);
    fails(&["--cni-plugin=/nonexistent/plugin"], "--cni-plugin");
    let elsewhere = |conf: &Path, bin: &Path| Cni {
        conf: conf.to_owned(),
        bin: bin.to_owned(),
    };
    let nowhere = Path::new("/nonexistent");
    fails_in(&elsewhere(nowhere, &cni.bin), &[], "--cni-conf-dir");
    fails_in(&elsewhere(&cni.conf, nowhere), &[], "--cni-bin-dir");
    fails(
        &["--cni-conf-name=20-other.conflist"],
        "there is no 20-other.conflist yet",
    );
    fails(
        &[
            "--cni-owned-config",
            "--cni-owned-config-filename=99-late.conflist",
        ],
        "give a name that sorts before",
    );
    fails(&["--inpod-uds=/x"], "INPOD_UDS");
    // In a mount namespace of its own, where the node's directory is read-only.
    let mut unshare = command(&node.host.ns, "unshare");
    let script = r#"mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@""#;
    unshare.args(["--mount", "sh", "-c", script, "sh"]).arg(&cni.bin);
    unshare
        .arg(binary().expect("the suite needs it"))
        .arg("install-cni")
        .args(cni.arguments());
    let (status, said) = output(&mut unshare, DEADLINE);
    assert!(
        !status.success() && said.contains("mount the node's directory so that it can be written"),
        "{said}"
    );
    assert_eq!(cni.names(), ["10-net.conflist"]);
    assert_eq!(cni.read("10-net.conflist"), LIST);
}

/// What the agent says of its readiness.
pub(crate) fn readiness(node: &Node) -> (u16, String) {
    let address = (std::net::Ipv4Addr::LOCALHOST, 15021).into();
    app::http_get(&node.host.ns, address, "/healthz/ready").expect("the agent answers")
}

/// Waits until the runtime calls our plugin.
pub(crate) fn wait_chained(cni: &Cni, agent: &Agent) {
    wait::within(2 * wait::DEADLINE, "the plugin to be chained", || {
        (cni.is_chained() && cni.has_binary()).then_some(())
    });
    assert!(Path::new(&format!("/proc/{}", agent.pid())).exists());
}
