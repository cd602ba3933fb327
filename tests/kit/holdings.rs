//! What an agent holds, as numbers that come back: of its process, of the kernel's eBPF objects, and of files. And what
//! capture leaves in a pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
    time::Duration,
};

use redirector::redirect::ebpf::object::OBJECT;
use serde_json::Value;

use crate::{agent::Agent, bpf::object::Loaded, node::Node, node::Pod, wait};

/// Names of the kernel's objects end here (`BPF_OBJ_NAME_LEN`).
const NAME_BYTES: usize = 15;

/// What an agent holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holdings {
    /// Descriptors of its process, by kind.
    pub descriptors: BTreeMap<String, usize>,
    /// Programs in the kernel, by name. What nobody holds has no owner, so these are all that no other agent holds.
    pub programs: BTreeMap<String, usize>,
    /// Maps in the kernel, by name; the same.
    pub maps: BTreeMap<String, usize>,
    /// Links of these programs; the same.
    pub links: usize,
    /// Entries of those of the maps that grow and shrink, by name.
    pub entries: BTreeMap<String, usize>,
    /// Files below its directory of pins; which slot a pod has is left out, since a repair may give it another.
    pub pins: BTreeSet<PathBuf>,
    /// Records of pods.
    pub records: BTreeSet<PathBuf>,
    /// The node's ends of pods' veths: one whose pod's namespace is held by somebody stays.
    pub veths: usize,
}

/// Memory and time of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Resident, in KiB.
    pub resident_kib: u64,
    /// Threads.
    pub threads: u64,
    /// Processor time used so far, by itself and for it.
    pub cpu: Duration,
}

/// Names of our programs and maps, cut as the kernel does; maps that the loader makes of sections have names that others use too.
static OURS: LazyLock<(BTreeSet<String>, BTreeSet<String>)> = LazyLock::new(|| {
    let object = Loaded::read(OBJECT).expect("the embedded object can be read");
    let cut = |name: &String| name.chars().take(NAME_BYTES).collect::<String>();
    let programs = object.programs.keys().map(cut);
    let maps = object
        .maps
        .values()
        .map(|map| &map.name)
        .filter(|name| !name.starts_with('.'));
    (programs.collect(), maps.map(cut).collect())
});

impl Holdings {
    /// Counts. Not while an agent ends: the kernel (6.18) never frees a prog array that somebody opens by its number, as bpftool
    /// does, just after its last user has closed it.
    pub fn of(agent: &Agent, node: &Node) -> Self {
        let (ours, maps_of_ours) = &*OURS;
        let own = agent.bpffs_dir();
        let opened = Opened::elsewhere(agent);
        let [programs, maps, links] = ["prog", "map", "link"].map(|what| bpftool(&["-f", what, "show"]));
        // A link holds its program.
        let linked_elsewhere: BTreeSet<u64> = links
            .iter()
            .filter(|link| pinned_elsewhere(link, &own))
            .filter_map(|link| link["prog_id"].as_u64())
            .collect();
        let of_ours = |object: &&Value, ours: &BTreeSet<String>, opened: &BTreeSet<u64>| {
            let id = object["id"].as_u64().unwrap_or_default();
            object["name"].as_str().is_some_and(|name| ours.contains(name))
                && !opened.contains(&id)
                && !pinned_elsewhere(object, &own)
        };
        let programs: Vec<&Value> = programs
            .iter()
            .filter(|program| of_ours(program, ours, &opened.programs))
            .filter(|program| !linked_elsewhere.contains(&program["id"].as_u64().unwrap_or_default()))
            .collect();
        let ids: BTreeSet<Option<u64>> = programs.iter().map(|program| program["id"].as_u64()).collect();
        let maps: Vec<&Value> = maps
            .iter()
            .filter(|map| of_ours(map, maps_of_ours, &opened.maps))
            .collect();
        // What is made once for all pods is always there: otherwise we are blind.
        assert!(!maps.is_empty(), "bpftool shows none of the agent's maps");
        let name = |object: &&Value| object["name"].as_str().unwrap_or_default().to_owned();
        let devices = node.host.ns.proc_net("dev").expect("the node has devices");
        Self {
            descriptors: count(agent.descriptors().into_iter().map(kind)),
            programs: count(programs.iter().map(name)),
            maps: count(maps.iter().map(name)),
            links: links
                .iter()
                .filter(|link| ids.contains(&link["prog_id"].as_u64()))
                .count(),
            entries: count_entries(&maps),
            pins: below(&own).iter().map(|path| without_slot(path)).collect(),
            records: below(&agent.state_dir().join("pods")),
            veths: devices
                .lines()
                .filter(|line| line.trim_start().starts_with("veth"))
                .count(),
        }
    }

    /// Waits until no more is held than `before`: closing takes the kernel a moment.
    ///
    /// # Panics
    /// When more is held for longer.
    pub fn settle(agent: &Agent, node: &Node, before: &Self) -> Self {
        let mut now = Self::of(agent, node);
        let end = std::time::Instant::now() + wait::DEADLINE;
        while !now.is_within(before) {
            assert!(!wait::interrupted(), "interrupted while counting");
            assert!(
                std::time::Instant::now() < end,
                "before: {before:#?}\nafter: {now:#?}"
            );
            std::thread::sleep(Duration::from_millis(200));
            now = Self::of(agent, node);
        }
        now
    }

    fn is_within(&self, before: &Self) -> bool {
        let within = |now: &BTreeMap<String, usize>, before: &BTreeMap<String, usize>| {
            now.iter()
                .all(|(kind, count)| count <= before.get(kind).unwrap_or(&0))
        };
        within(&self.descriptors, &before.descriptors)
            && within(&self.programs, &before.programs)
            && within(&self.maps, &before.maps)
            && self.links <= before.links
            && within(&self.entries, &before.entries)
            && self.pins == before.pins
            && self.records == before.records
            && self.veths <= before.veths
    }

    /// In a line.
    pub fn line(&self) -> String {
        let sum = |counts: &BTreeMap<String, usize>| counts.values().sum::<usize>();
        format!(
            "{} descriptors {:?}, {} programs, {} maps, {} links, {} map entries, {} pins, {} records, {} veths",
            sum(&self.descriptors),
            self.descriptors,
            sum(&self.programs),
            sum(&self.maps),
            self.links,
            self.entries.values().sum::<usize>(),
            self.pins.len(),
            self.records.len(),
            self.veths,
        )
    }
}

impl Process {
    /// Reads them of the agent.
    ///
    /// # Panics
    /// When it has ended.
    pub fn of(agent: &Agent) -> Self {
        let directory = PathBuf::from(format!("/proc/{}", agent.pid()));
        let status = fs::read_to_string(directory.join("status")).expect("the agent runs");
        let value = |key: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let value = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
            value.expect("the kernel tells it")
        };
        let stat = fs::read_to_string(directory.join("stat")).expect("the agent runs");
        // After the name, which is in brackets: state is the third field of all, user and system time are 14 and 15.
        let (_, rest) = stat.rsplit_once(')').expect("there is a name");
        let ticks: u64 = rest
            .split_whitespace()
            .skip(11)
            .take(2)
            .map(|ticks| ticks.parse::<u64>().expect("a number"))
            .sum();
        /// `USER_HZ`, the unit of these on all machines of ours.
        const TICKS_PER_SECOND: u64 = 100;
        Self {
            resident_kib: value("VmRSS:"),
            threads: value("Threads:"),
            cpu: Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND),
        }
    }
}

/// Rules, routes and listening sockets of a pod.
pub fn in_pod(pod: &Pod) -> BTreeSet<String> {
    let lines = |command: &str| -> Vec<String> {
        let text = pod.ns.ip_output(command);
        text.lines().map(|line| format!("{command}: {line}")).collect()
    };
    // Neighbour discovery's own routes come and go.
    let routes = ["-4 route show table all", "-6 route show table all"]
        .map(lines)
        .concat()
        .into_iter()
        .filter(|line| !line.contains("expires") && !line.contains("proto kernel"));
    let sockets = ["tcp", "tcp6"].into_iter().flat_map(|file| {
        let text = pod.ns.proc_net(file).expect("the pod has sockets");
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let listening = |words: &Vec<String>| words.get(3).is_some_and(|state| state == "0A");
        text.lines()
            .map(words)
            .filter(listening)
            .map(|words| format!("listens at {}", words[1]))
            .collect::<Vec<_>>()
    });
    let rules = ["-4 rule show", "-6 rule show"].map(lines).concat();
    rules.into_iter().chain(routes).chain(sockets).collect()
}

/// What `bpftool` tells, as a list of objects.
fn bpftool(arguments: &[&str]) -> Vec<Value> {
    let output = Command::new("bpftool")
        .arg("-j")
        .args(arguments)
        .output()
        .expect("bpftool runs");
    // An object that goes away while it looks is an error of its own behind the list.
    serde_json::Deserializer::from_slice(&output.stdout)
        .into_iter::<Value>()
        .next()
        .and_then(Result::ok)
        .and_then(|list| list.as_array().cloned())
        .unwrap_or_default()
}

/// Whether an object has a pin that is not below `own`.
fn pinned_elsewhere(object: &Value, own: &Path) -> bool {
    let pins = object["pinned"].as_array().into_iter().flatten();
    pins.filter_map(Value::as_str)
        .any(|pin| !Path::new(pin).starts_with(own))
}

/// Objects that other processes on this machine have open.
#[derive(Debug, Default)]
struct Opened {
    programs: BTreeSet<u64>,
    maps: BTreeSet<u64>,
}

impl Opened {
    fn elsewhere(agent: &Agent) -> Self {
        let mut opened = Self::default();
        let own = agent.pid().to_string();
        for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = process.file_name();
            if *name == *own || !name.as_encoded_bytes().iter().all(u8::is_ascii_digit) {
                continue;
            }
            let descriptors = fs::read_dir(process.path().join("fdinfo"));
            for descriptor in descriptors.into_iter().flatten().flatten() {
                let text = fs::read_to_string(descriptor.path()).unwrap_or_default();
                for line in text.lines() {
                    let id = |key| {
                        line.strip_prefix(key)
                            .and_then(|id| id.trim().parse::<u64>().ok())
                    };
                    opened.maps.extend(id("map_id:"));
                    opened.programs.extend(id("prog_id:"));
                }
            }
        }
        opened
    }
}

/// A namespace that was opened by path is called by that.
fn kind(descriptor: String) -> String {
    if descriptor.starts_with("/run/netns/") {
        "namespace".to_owned()
    } else {
        descriptor
    }
}

fn count(names: impl IntoIterator<Item = String>) -> BTreeMap<String, usize> {
    names.into_iter().fold(BTreeMap::new(), |mut counts, name| {
        *counts.entry(name).or_default() += 1;
        counts
    })
}

/// All files and directories below one.
fn below(directory: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut open = vec![directory.to_owned()];
    while let Some(directory) = open.pop() {
        for path in fs::read_dir(directory)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
        {
            if path.is_dir() {
                open.push(path.clone());
            }
            found.insert(path);
        }
    }
    found
}

/// A path below `pods/SLOT-UID` as `pods/UID`.
fn without_slot(path: &Path) -> PathBuf {
    let mut shown = PathBuf::new();
    for part in path {
        let name = part.to_str().unwrap_or_default();
        match name.split_once('-') {
            Some((slot, uid)) if shown.ends_with("pods") && slot.parse::<u32>().is_ok() => shown.push(uid),
            _ => shown.push(part),
        }
    }
    shown
}

/// Entries of the maps whose number can change, by name.
fn count_entries(maps: &[&Value]) -> BTreeMap<String, usize> {
    const GROWING: [&str; 5] = ["hash", "lru_hash", "percpu_hash", "lru_percpu_hash", "lpm_trie"];
    let mut entries = BTreeMap::new();
    for map in maps {
        let growing = map["type"].as_str().is_some_and(|kind| GROWING.contains(&kind));
        if let (true, Some(name), Some(id)) = (growing, map["name"].as_str(), map["id"].as_u64()) {
            let found = bpftool(&["map", "dump", "id", &id.to_string()]).len();
            *entries.entry(name.to_owned()).or_default() += found;
        }
    }
    entries
}
