//! The agent in a container, as kubelet and a container runtime would start it from the DaemonSet: runc, the capabilities, the read-only
//! root and mounts that the chart writes, and what runtimes add unasked: a read-only /proc/sys, masked paths, a seccomp profile.
//!
//! The node is the kit's; its paths are a directory of the test, but for the kernel's own.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use nix::sys::signal::Signal;
use redirector_tests::{
    agent::binary,
    app::{self, App},
    chart::{items, text},
    cni,
    mesh::PORT,
    netns::unique_prefix,
    node::{Family, Node, Pod},
    process::{self, Process},
    wait,
    workloads::Workloads,
};
use serde_json::{Value, json};

use crate::{
    chart::{capabilities, environment, render},
    objects::only,
};

/// What `runtime-spec/config-linux.md` calls `maskedPaths` and `readonlyPaths`, as containerd and CRI-O give them to containers that are
/// not privileged.
const MASKED: [&str; 9] = [
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
];
const READ_ONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// The profile that `RuntimeDefault` means to CRI-O; containerd's is like it.
const SECCOMP: &str = "/usr/share/containers/seccomp.json";

const DEADLINE: Duration = Duration::from_secs(60);
/// Another user than root, whose directories the CNI's are on some nodes.
const SOMEBODY: u32 = 1001;

/// A node with a place for its paths.
struct Ground {
    client: Pod,
    server: Pod,
    objects: Vec<Value>,
    node: Node,
}

impl Ground {
    fn new() -> Self {
        Self::with(&json!({}))
    }

    /// With more values for the chart.
    fn with(more: &Value) -> Self {
        let node = Node::new();
        let (client, server) = (node.pod("client"), node.pod("server"));
        let mut ground = Self {
            client,
            server,
            objects: Vec::new(),
            node,
        };
        ground.objects = ground.render(more);
        // What the node has before any agent comes.
        let bpffs = ground.of_node("/sys/fs/bpf");
        fs::create_dir_all(&bpffs).unwrap();
        succeed(Command::new("mount").args(["-t", "bpf", "bpf"]).arg(&bpffs));
        for directory in ["/etc/cni/net.d", "/opt/cni/bin"] {
            let directory = ground.of_node(directory);
            fs::create_dir_all(&directory).unwrap();
            chown(&directory, Some(SOMEBODY), Some(SOMEBODY)).unwrap();
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let bridge = json!({"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge"}]});
        fs::write(
            ground.of_node("/etc/cni/net.d/10-net.conflist"),
            bridge.to_string(),
        )
        .unwrap();
        ground
    }

    /// What the chart gives for a mesh of the two pods, by more values.
    fn render(&self, more: &Value) -> Vec<Value> {
        let mut values = json!({
            "controlPlane": {"xdsAddress": ""},
            "certificates": {"source": "development"},
            "workloads": Workloads::hbone([&self.client, &self.server]).to_yaml(),
            // Without Kubernetes, all pods that the plugin tells of are enrolled.
            "settings": {"kubernetes-pods": false},
        });
        let more = more.as_object().expect("a map").clone();
        values.as_object_mut().expect("a map").extend(more);
        render(&values)
    }

    /// Where a path of the node is: the kernel's own are the machine's.
    fn of_node(&self, path: &str) -> PathBuf {
        match path {
            "/proc" | "/sys/fs/cgroup" | "/sys/kernel/rcu_expedited" => path.into(),
            "/var/run/netns" => "/run/netns".into(),
            _ => self
                .node
                .directory()
                .join("node")
                .join(path.trim_start_matches('/')),
        }
    }

    /// Where a volume's content is.
    fn volume(&self, objects: &[Value], name: &str) -> PathBuf {
        let volume = items(&pod(objects)["volumes"]).find(|volume| volume["name"] == name);
        let volume = volume.unwrap_or_else(|| panic!("no volume is named {name}"));
        if let Some(path) = volume["hostPath"]["path"].as_str() {
            let path = self.of_node(path);
            if volume["hostPath"]["type"] == "DirectoryOrCreate" {
                fs::create_dir_all(&path).unwrap();
            }
            if volume["hostPath"]["type"] == "FileOrCreate" {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::File::options().create(true).append(true).open(&path).unwrap();
            }
            return path;
        }
        assert_eq!(name, "config", "{volume}");
        let directory = self.node.directory().join(unique_prefix());
        fs::create_dir_all(&directory).unwrap();
        for (file, content) in only(objects, "ConfigMap")["data"].as_object().unwrap() {
            fs::write(directory.join(file), text(content)).unwrap();
        }
        directory
    }

    /// Starts the container, after a change to what the DaemonSet says of it.
    fn start(&self, change: impl FnOnce(&mut Value)) -> Container {
        self.start_of(&self.objects, change)
    }

    fn start_of(&self, objects: &[Value], change: impl FnOnce(&mut Value)) -> Container {
        let pod = pod(objects);
        let mut container = pod["containers"][0].clone();
        change(&mut container);
        let mounts = items(&container["volumeMounts"]).map(|mount| {
            let propagation = match mount["mountPropagation"].as_str() {
                Some("HostToContainer") => "rslave",
                None => "rprivate",
                Some(other) => panic!("{other} is not known here"),
            };
            let access = if mount["readOnly"] == true { "ro" } else { "rw" };
            json!({
                "destination": mount["mountPath"], "type": "bind", "source": self.volume(objects, text(&mount["name"])),
                "options": ["rbind", propagation, access],
            })
        });
        let spec = specification(pod, &container, mounts.collect(), (&self.node, &self.root()));
        Container::start(&self.node, &spec)
    }

    /// The image's files: those of `cargo xtask image`, or the programs as they are here, with the libraries that they want.
    fn root(&self) -> PathBuf {
        if let Some(root) = std::env::var_os("REDIRECTOR_IMAGE_ROOT") {
            return root.into();
        }
        let root = self.node.directory().join("root");
        let bin = root.join("usr/local/bin");
        if bin.exists() {
            return root;
        }
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(root.join("run")).unwrap();
        fs::create_dir_all(root.join("var")).unwrap();
        symlink("/run", root.join("var/run")).unwrap();
        let programs = [
            binary().unwrap(),
            binary().unwrap().with_file_name("redirector-cni"),
        ];
        for program in &programs {
            copy_with_libraries(&root, program, &bin.join(program.file_name().unwrap()));
        }
        root
    }

    /// Adds the programs that write iptables rules to the image's files, as Debian's package has them.
    fn add_iptables(&self) {
        let root = self.root();
        let multi = "/usr/sbin/xtables-nft-multi";
        copy_with_libraries(&root, Path::new(multi), &root.join(&multi[1..]));
        for name in [
            "iptables-restore",
            "iptables-save",
            "ip6tables-restore",
            "ip6tables-save",
        ] {
            symlink(multi, root.join("usr/sbin").join(name)).unwrap();
        }
        let matches = fs::read_dir("/usr/lib/x86_64-linux-gnu/xtables").expect("iptables is installed");
        for file in matches.map(|entry| entry.unwrap().path()) {
            let copy = root.join(file.strip_prefix("/").unwrap());
            copy_with_libraries(&root, &file, &copy);
        }
    }

    /// The pods are enrolled by an agent, talk through a proxy, which logs whose connection it was, and are released.
    fn pods_talk(&self, agent: &Container, proxy: &Container) {
        for pod in [&self.client, &self.server] {
            let answer = self.tell("/cmdadd", pod);
            assert_eq!(answer.status, 200, "{}\n{}", answer.body, agent.said());
        }
        let _app = App::start(&self.server.ns, (Family::V4.any(), PORT).into(), app::who);
        app::ask_who(&self.client.ns, self.server.addr(Family::V4, PORT)).unwrap();
        wait::until("the connection's record", || {
            proxy.said().contains(&self.client.identity()).then_some(())
        });
        for pod in [&self.client, &self.server] {
            assert_eq!(self.tell("/cmddel", pod).status, 200);
        }
    }

    fn tell(&self, path: &str, pod: &Pod) -> cni::Answer {
        let socket = self.of_node("/run/redirector/cni.sock");
        let mut event = cni::event(pod);
        // As container runtimes name it.
        event["Netns"] = json!(Path::new("/var/run/netns").join(pod.ns.name()));
        cni::post(&socket, path, &event.to_string()).unwrap_or_else(|error| panic!("{error:#}"))
    }
}

/// Copies a program into a root directory, and the libraries that it wants to where they are.
fn copy_with_libraries(root: &Path, program: &Path, to: &Path) {
    let copy = |from: &Path, to: &Path| {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap_or_else(|error| panic!("copying {}: {error}", from.display()));
    };
    copy(program, to);
    let libraries = Command::new("ldd").arg(program).output();
    let libraries = String::from_utf8(libraries.expect("ldd is of the C library").stdout).unwrap();
    for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        let to = root.join(library.trim_start_matches('/'));
        if !to.exists() {
            copy(Path::new(library), &to);
        }
    }
}

/// The pod of the DaemonSet.
fn pod(objects: &[Value]) -> &Value {
    &only(objects, "DaemonSet")["spec"]["template"]["spec"]
}

/// The container for the OCI runtime, as a CRI runtime translates it.
fn specification(pod: &Value, container: &Value, mounts: Vec<Value>, (node, root): (&Node, &Path)) -> Value {
    let context = &container["securityContext"];
    let held: Vec<_> = capabilities(container).into_iter().collect();
    let mut arguments = vec!["/usr/local/bin/redirector"];
    arguments.extend(items(&container["args"]).map(text));
    let environment = environment(container);
    let environment = environment.iter().map(|(name, value)| format!("{name}={value}"));
    let own = |destination: &str, kind: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": kind, "options": options});
    let taken: BTreeSet<_> = mounts
        .iter()
        .map(|mount| text(&mount["destination"]).to_owned())
        .collect();
    let usual = [
        own("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        own(
            "/dev",
            "tmpfs",
            &["nosuid", "strictatime", "mode=755", "size=65536k"],
        ),
        own(
            "/dev/shm",
            "tmpfs",
            &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
        ),
        own("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        own(
            "/sys/fs/cgroup",
            "cgroup",
            &["nosuid", "noexec", "nodev", "relatime", "ro"],
        ),
    ];
    let usual = usual
        .into_iter()
        .filter(|mount| !taken.contains(text(&mount["destination"])));
    assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault");
    // The node's processes, where they are asked for, and its network; the rest is the container's own.
    assert_eq!(pod["hostNetwork"], true);
    let mut namespaces = vec![
        json!({"type": "mount"}),
        json!({"type": "ipc"}),
        json!({"type": "cgroup"}),
        json!({"type": "network", "path": node.host.ns.path()}),
    ];
    if pod["hostPID"] != true {
        namespaces.push(json!({"type": "pid"}));
    }
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": context["runAsUser"], "gid": context["runAsGroup"]},
            "args": arguments, "env": environment.collect::<Vec<_>>(), "cwd": "/",
            "capabilities": {"bounding": held, "effective": held, "permitted": held},
            "noNewPrivileges": context["allowPrivilegeEscalation"] == false,
        },
        "root": {"path": root, "readonly": context["readOnlyRootFilesystem"]},
        "hostname": "",
        "mounts": usual.chain(mounts).collect::<Vec<_>>(),
        "linux": {
            "namespaces": namespaces,
            "maskedPaths": MASKED, "readonlyPaths": READ_ONLY, "seccomp": seccomp(&held),
            "resources": {"devices": [{"allow": false, "access": "rwm"}]},
        },
    })
}

/// The runtime's usual profile for a container with these capabilities.
fn seccomp(held: &[String]) -> Value {
    let profile = fs::read_to_string(SECCOMP).expect("golang-github-containers-common is installed");
    let profile: Value = serde_json::from_str(&profile).unwrap();
    let holds = |name: &Value| held.iter().any(|held| held == text(name));
    let is_included = |conditions: &Value| {
        let mut architectures = items(&conditions["arches"]).peekable();
        let here = architectures.peek().is_none() || architectures.any(|name| name == "amd64");
        here && items(&conditions["caps"]).all(holds)
    };
    let is_excluded = |conditions: &Value| {
        items(&conditions["arches"]).any(|name| name == "amd64") || items(&conditions["caps"]).any(holds)
    };
    let calls = items(&profile["syscalls"])
        .filter(|call| is_included(&call["includes"]) && !is_excluded(&call["excludes"]));
    let calls = calls.map(|call| {
        let mut call = call.clone();
        let fields = call.as_object_mut().unwrap();
        fields.retain(|key, value| {
            ["names", "action", "args", "errnoRet"].contains(&key.as_str()) && !value.is_null()
        });
        call
    });
    json!({
        "defaultAction": profile["defaultAction"], "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": ["SCMP_ARCH_X86_64"], "syscalls": calls.collect::<Vec<_>>(),
    })
}

/// A container of runc's, removed when dropped.
struct Container {
    name: String,
    state: PathBuf,
    process: Process,
}

impl Container {
    fn start(node: &Node, spec: &Value) -> Self {
        let name = unique_prefix();
        let bundle = node.directory().join(&name);
        fs::create_dir_all(&bundle).unwrap();
        fs::write(bundle.join("config.json"), format!("{spec:#}")).unwrap();
        let state = node.directory().join("runc");
        let mut runc = Command::new("setpriv");
        runc.args(["--pdeathsig", "TERM", "--", "runc", "--root"])
            .arg(&state);
        runc.args(["run", "--bundle"]).arg(&bundle).arg(&name);
        let process = Process::start(&mut runc, &bundle.join("log")).unwrap();
        Self { name, state, process }
    }

    fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.process.ended()
    }

    fn said(&self) -> String {
        self.process.output()
    }

    /// Waits until it ends by itself.
    fn end(&mut self) -> std::process::ExitStatus {
        let status = self.process.wait(DEADLINE);
        status.unwrap_or_else(|| panic!("it has not ended: {}", self.said()))
    }

    fn wait_ready(&mut self, node: &Node) {
        self.wait_ready_at(node, 15021);
    }

    fn wait_ready_at(&mut self, node: &Node, port: u16) {
        let ready = (std::net::Ipv4Addr::LOCALHOST, port).into();
        wait::within(DEADLINE, "the agent to be ready", || {
            assert!(self.ended().is_none(), "it ended: {}", self.said());
            let (status, _) = app::http_get(&node.host.ns, ready, "/healthz/ready").ok()?;
            (status == 200).then_some(())
        });
        let (status, _) = app::http_get(&node.host.ns, ready, "/healthz/live").unwrap();
        assert_eq!(status, 200);
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // runc passes SIGTERM on, and ends with the container; what does not end by that is killed.
        if self.ended().is_none() {
            self.process.signal(Signal::SIGTERM);
            self.process.wait(Duration::from_secs(10));
        }
        let mut delete = Command::new("runc");
        delete
            .arg("--root")
            .arg(&self.state)
            .args(["delete", "--force", &self.name]);
        let _ = delete.output();
    }
}

fn succeed(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

pub(crate) fn the_agent_works_as_the_daemonset_says() {
    let ground = Ground::new();
    let mut agent = ground.start(|_| {});
    agent.wait_ready(&ground.node);
    for pod in [&ground.client, &ground.server] {
        let answer = ground.tell("/cmdadd", pod);
        assert_eq!(answer.status, 200, "{}\n{}", answer.body, agent.said());
    }
    let _app = App::start(&ground.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let who = app::ask_who(&ground.client.ns, ground.server.addr(Family::V4, PORT)).unwrap();
    assert_eq!(who, ground.client.ip(Family::V4).to_string());
    wait::until("the connection's record", || {
        agent.said().contains(&ground.client.identity()).then_some(())
    });
    // The plugin is in place, in directories that are not root's.
    let conflist = fs::read_to_string(ground.of_node("/etc/cni/net.d/10-net.conflist")).unwrap();
    assert!(conflist.contains("redirector-cni"), "{conflist}");
    let mut plugin = Command::new(ground.of_node("/opt/cni/bin/redirector-cni"));
    plugin
        .env("CNI_COMMAND", "VERSION")
        .stdin(std::process::Stdio::null());
    let (status, version) = process::output(&mut plugin, DEADLINE);
    assert!(
        status.success() && version.contains("supportedVersions"),
        "{version}"
    );
    // The next agent takes the pods over from what is on the node.
    agent.process.signal(Signal::SIGTERM);
    let status = agent.end();
    assert!(status.success(), "{status}: {}", agent.said());
    drop(agent);
    let mut next = ground.start(|_| {});
    next.wait_ready(&ground.node);
    app::ask_who(&ground.client.ns, ground.server.addr(Family::V4, PORT)).unwrap();
    for pod in [&ground.client, &ground.server] {
        assert_eq!(ground.tell("/cmddel", pod).status, 200);
    }
}

pub(crate) fn rules_of_iptables_can_be_written_from_the_container() {
    let ground = Ground::with(&json!({"redirect": "iptables"}));
    ground.add_iptables();
    let mut agent = ground.start(|_| {});
    agent.wait_ready(&ground.node);
    ground.pods_talk(&agent, &agent);
}

/// One agent in the place of istio-cni, and another in that of ztunnel: what the first needs of the kernel to serve pods by the second, the
/// container lets it have.
pub(crate) fn a_proxy_in_another_container_serves_the_pods() {
    let ground = Ground::with(&json!({"proxy": "ztunnel", "workloads": ""}));
    let proxy = ground.render(&json!({
        "pods": "zds",
        // Of the node, and both are on it here.
        "settings": {
            "state-dir": "/run/redirector/proxy", "admin-addr": "127.0.0.1:15100",
            "metrics-addr": "127.0.0.1:15120", "readiness-addr": "127.0.0.1:15121",
        },
    }));
    let mut agent = ground.start(|_| {});
    agent.wait_ready(&ground.node);
    let mut proxy = ground.start_of(&proxy, |_| {});
    proxy.wait_ready_at(&ground.node, 15121);
    ground.pods_talk(&agent, &proxy);
}

pub(crate) fn what_the_daemonset_leaves_out_is_missed() {
    let ground = Ground::new();
    for lacking in ["NET_ADMIN", "NET_RAW", "SYS_ADMIN"] {
        let mut agent = ground.start(|container| {
            let added = container["securityContext"]["capabilities"]["add"]
                .as_array_mut()
                .unwrap();
            added.retain(|name| name != lacking);
        });
        assert!(!agent.end().success());
        assert!(
            agent.said().contains(&format!("lacks CAP_{lacking}")),
            "{lacking}: {}",
            agent.said()
        );
    }
    let without = |volume: &str| {
        ground.start(|container| {
            let mounts = container["volumeMounts"].as_array_mut().unwrap();
            mounts.retain(|mount| mount["name"] != volume);
        })
    };
    // Pins that end with the container would leave the pods in plain.
    let mut agent = without("bpffs");
    assert!(!agent.end().success());
    let said = agent.said();
    assert!(said.contains("mount -t bpf bpf /sys/fs/bpf"), "{said}");
    let mut agent = without("proc");
    agent.wait_ready(&ground.node);
    let answer = ground.tell("/cmdadd", &ground.client);
    assert_eq!(answer.status, 500);
    assert!(answer.body.contains("/host/proc"), "{}", answer.body);
}
