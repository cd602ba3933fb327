//! By hand: two namespaces made by plain commands, an agent started as anybody would, and curl on its Unix socket.

use std::{
    fs,
    path::Path,
    process::{Command, ExitCode},
};

use redirector_tests::{
    agent::binary,
    netns::{Directory, sweep, unique_prefix},
    suite::{Needs, case, main as suite},
    wait,
};

fn main() -> ExitCode {
    suite(
        Needs::Agent,
        1,
        vec![case("plain_commands_do", plain_commands_do)],
    )
}

/// The commands, for `sh -e`. NODE, A and B are namespaces, D is a directory, BIN is the daemon.
const SET_UP: &str = "
ip netns add $NODE
ip netns add $A
ip netns add $B
ip -n $NODE link set lo up
ip -n $A link set lo up
ip -n $B link set lo up
ip link add name eth0 netns $A type veth peer name eth0 netns $B
ip -n $A addr add 198.18.0.1/24 dev eth0
ip -n $B addr add 198.18.0.2/24 dev eth0
ip -n $A link set eth0 up
ip -n $B link set eth0 up
mkdir -p $D/www
echo it works > $D/www/file
";

const WORKLOADS: &str = "
workloads:
- {name: a, namespace: demo, serviceAccount: a, trustDomain: cluster.local, workloadIps: [198.18.0.1], protocol: HBONE, services: {}}
- {name: b, namespace: demo, serviceAccount: b, trustDomain: cluster.local, workloadIps: [198.18.0.2], protocol: HBONE, services: {}}
";

const START_AGENT: &str = "
exec nsenter --net=/run/netns/$NODE setpriv --pdeathsig KILL $BIN agent --cni-socket $D/cni.sock --state-dir $D/state \
 --bpffs-dir $D/bpf --workloads $D/workloads.yaml > $D/agent.log 2>&1
";

const START_SERVER: &str = "
exec ip netns exec $B setpriv --pdeathsig KILL /usr/bin/python3 -m http.server --directory $D/www 8080 > $D/server.log 2>&1
";

const ENROL: &str = r#"
for P in a b; do
  curl --silent --show-error --fail-with-body --max-time 30 --unix-socket $D/cni.sock http://unix/cmdadd \
    -H 'Content-Type: application/json' -d '{"Netns":"/run/netns/'$NS-$P'","PodName":"'$P'","PodNamespace":"demo",
    "PodUID":"by-hand-'$P'","ServiceAccount":"'$P'",
    "IPs":[{"Interface":0,"Address":{"IP":"198.18.0.'$(if [ $P = a ]; then echo 1; else echo 2; fi)'","Mask":"////AA=="},"Gateway":""}]}'
done
"#;

const TALK: &str = "
ip netns exec $A curl --silent --show-error --fail --max-time 20 http://198.18.0.2:8080/file
";

const TEAR_DOWN: &str = "
ip netns del $A
ip netns del $B
ip netns del $NODE
";

/// A shell with the names.
fn shell(prefix: &str, directory: &Path, script: &str) -> Command {
    let mut shell = Command::new("sh");
    shell
        .args(["-e", "-c", script])
        .env("D", directory)
        .env("NS", prefix)
        .env("BIN", binary().unwrap());
    shell.env("XDS_ADDRESS", "").env("CA_ADDRESS", "");
    for (variable, name) in [("NODE", "node"), ("A", "a"), ("B", "b")] {
        shell.env(variable, format!("{prefix}-{name}"));
    }
    shell
}

fn run(prefix: &str, directory: &Path, script: &str) -> Result<String, String> {
    let output = shell(prefix, directory, script)
        .output()
        .expect("there is a shell");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    if output.status.success() {
        Ok(text)
    } else {
        Err(text)
    }
}

/// Ends a child by its process id, and removes what was made.
struct Ended<'a>(std::process::Child, &'a str);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "---- {}\n{}",
                self.1,
                fs::read_to_string(self.1).unwrap_or_default()
            );
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct TornDown<'a>(&'a str, &'a Path);

impl Drop for TornDown<'_> {
    fn drop(&mut self) {
        if let Err(error) = run(self.0, self.1, TEAR_DOWN) {
            eprintln!("{error}");
        }
    }
}

fn plain_commands_do() {
    sweep();
    let prefix = unique_prefix();
    let directory = Directory::create(&prefix).unwrap();
    let here = directory.path();
    let _torn_down = TornDown(&prefix, here);
    run(&prefix, here, SET_UP).unwrap();
    fs::write(here.join("workloads.yaml"), WORKLOADS).unwrap();
    let logs = ["agent.log", "server.log"].map(|log| here.join(log).display().to_string());
    let start = |script: &str| shell(&prefix, here, script).spawn().unwrap();
    let _agent = Ended(start(START_AGENT), &logs[0]);
    let _server = Ended(start(START_SERVER), &logs[1]);
    wait::until("the agent's socket", || {
        here.join("cni.sock").exists().then_some(())
    });
    run(&prefix, here, ENROL).unwrap();
    let said = wait::until("an answer", || run(&prefix, here, TALK).ok());
    assert_eq!(said, "it works\n");
    let identity = "spiffe://cluster.local/ns/demo/sa/a";
    wait::until("the client's identity in the access log", || {
        fs::read_to_string(&logs[0])
            .unwrap()
            .contains(identity)
            .then_some(())
    });
}
