//! Un-enrolment, uninstallation, and a change of backend: all of ours goes, and only that.

use std::{collections::BTreeSet, fs, process::Command, time::Duration};

use redirector_tests::{
    agent::{self, Options, Redirect},
    app::{self, App},
    footprint::{Footprint, Objects, alive, netns_links, pinned_below},
    mesh::{Mesh, PORT},
    node::{Family, Pod},
    process,
    suite::{Case, case},
    wait,
    workloads::Workloads,
};

use crate::{assert_one_of_each, assert_unchanged, hbone_works, ours, pins};

/// The tests of this module.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (attach, force_clsact) in [("tcx", false), ("clsact", true)] {
        let options = move || Options {
            force_clsact,
            ..Options::default()
        };
        cases.push(case(
            format!("release_leaves_what_was_there_{attach}"),
            move || release_leaves_what_was_there(options()),
        ));
        cases.push(case(
            format!("uninstall_leaves_what_was_there_{attach}"),
            move || uninstall_leaves_what_was_there(options()),
        ));
    }
    for (name, redirect) in [
        ("iptables_nft", Redirect::IptablesNft),
        ("iptables_legacy", Redirect::IptablesLegacy),
        ("none", Redirect::None),
    ] {
        let options = move || Options {
            redirect,
            ..Options::default()
        };
        if redirect != Redirect::None {
            cases.push(case(
                format!("uninstall_leaves_what_was_there_{name}"),
                move || uninstall_leaves_what_was_there(options()),
            ));
        }
        cases.push(case(format!("pods_move_to_{name}_and_back"), move || {
            pods_move_and_return(options())
        }));
    }
    cases.push(case(
        "uninstall_spares_a_running_agent",
        uninstall_spares_a_running_agent,
    ));
    cases.push(case(
        "uninstall_goes_on_after_a_failure",
        uninstall_goes_on_after_a_failure,
    ));
    cases.push(case(
        "uninstall_leaves_the_socket_of_another_agent",
        uninstall_leaves_the_socket_of_another_agent,
    ));
    cases.push(case("uninstall_of_nothing_is_fine", uninstall_of_nothing_is_fine));
    cases
}

/// The kernel frees objects when nothing refers to them any more, by and by.
fn assert_freed(objects: &Objects) {
    let mut left = Objects::new();
    let end = std::time::Instant::now() + wait::DEADLINE;
    while std::time::Instant::now() < end {
        left = alive(objects);
        if left.is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("of {objects:?} the kernel still has {left:?}");
}

fn release_leaves_what_was_there(options: Options) {
    let mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
    let pods = [&mesh.client, &mesh.server];
    let untouched = pods.map(|pod| Footprint::of(&pod.ns));
    let (pinned, shared) = (pins(&mesh), pinned_below(&mesh.agent.bpffs_dir()));
    for pod in pods {
        mesh.agent.enrol(pod);
    }
    hbone_works(&mesh);
    let objects = &pinned_below(&mesh.agent.bpffs_dir()) - &shared;
    assert!(!objects.is_empty());
    for pod in pods {
        mesh.agent.release(pod);
    }
    for (pod, before) in pods.into_iter().zip(&untouched) {
        assert_unchanged(before, pod, "after its release");
    }
    assert_eq!(pins(&mesh), pinned);
    assert_freed(&objects);
}

fn uninstall_leaves_what_was_there(options: Options) {
    let mut mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
    let pods = |mesh: &Mesh| [&mesh.client, &mesh.server].map(|pod| Footprint::of(&pod.ns));
    let untouched = pods(&mesh);
    let node = Footprint::of(&mesh.node.host.ns);
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.enrol(pod);
    }
    hbone_works(&mesh);
    // One whose agent was killed leaves most behind.
    mesh.agent.kill();
    let objects = pinned_below(&mesh.agent.bpffs_dir());
    let (status, output) = mesh.agent.uninstall(&mesh.node, &[]);
    assert!(status.success(), "{output}");
    for (pod, before) in [&mesh.client, &mesh.server].into_iter().zip(&untouched) {
        assert_unchanged(before, pod, "after the uninstallation");
    }
    let left = node.differences(&Footprint::of(&mesh.node.host.ns));
    assert!(
        left.iter().all(|line| line.starts_with("listeners")),
        "in the node's namespace: {left:?}"
    );
    assert_freed(&objects);
    assert_eq!(pins(&mesh), BTreeSet::new());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let bpffs = mesh.agent.bpffs_dir().display().to_string();
    assert!(!mounts.contains(&bpffs), "the bpffs is still mounted");
    assert!(!mesh.agent.bpffs_dir().exists());
    assert!(!mesh.agent.cni_socket().exists());

    // The development CA's key stays unless it is asked for: other nodes may share it.
    let state = mesh.agent.state_dir();
    let names = |directory: &std::path::Path| -> Vec<_> {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name()).collect()
    };
    assert_eq!(names(&state), ["ca"]);
    assert!(!names(&state.join("ca")).is_empty());
    // The pods talk plainly again.
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let seen = app::ask_who(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    assert_eq!(seen, mesh.client.v4.to_string());
    let (status, output) = mesh.agent.uninstall(&mesh.node, &["--remove-ca"]);
    assert!(status.success(), "{output}");
    assert!(!state.exists());
}

/// The agent is started again with another backend: what the first has left in the pods goes, once the other serves them.
fn pods_move_and_return(other: Options) {
    let mut mesh = Mesh::started(Options::default(), |client, server| {
        Workloads::hbone([client, server])
    });
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.enrol(pod);
    }
    for _ in 0..2 {
        hbone_works(&mesh);
        for pod in [&mesh.client, &mesh.server] {
            assert_one_of_each(pod);
            assert!(!has_rules(pod), "{} is redirected twice", pod.name);
        }
        mesh.agent.kill();
        mesh.agent.restart_with(&mesh.node, other.clone());
        for pod in [&mesh.client, &mesh.server] {
            assert!(ours(pod).is_empty() && netns_links(&pod.ns).is_empty());
            let routed = Footprint::of(&pod.ns);
            assert!(!routed.section("ip ").any(|line| line.contains("1337")));
        }
        if other.redirect != Redirect::None {
            hbone_works(&mesh);
        }
        mesh.agent.stop();
        mesh.agent.restart_with(&mesh.node, Options::default());
    }
    hbone_works(&mesh);
}

/// Whether there is a chain or a rule of iptables mode.
fn has_rules(pod: &Pod) -> bool {
    let in_tables = ["iptables-nft-save", "iptables-legacy-save"].iter().any(|save| {
        let saved = pod.ns.run(|| Command::new(save).output());
        saved.is_ok_and(|saved| String::from_utf8_lossy(&saved.stdout).contains("ISTIO"))
    });
    let footprint = Footprint::of(&pod.ns);
    in_tables || footprint.section("ip -4 rule").any(|line| line.contains("0x111"))
}

fn uninstall_spares_a_running_agent() {
    let mesh = Mesh::hbone(Options::default());
    let (before, pinned) = (Footprint::of(&mesh.client.ns), pins(&mesh));
    let (status, output) = mesh.agent.uninstall(&mesh.node, &[]);
    assert_eq!(status.code(), Some(3), "{output}");
    assert!(
        output.contains(&format!("process {}", mesh.agent.pid())),
        "{output}"
    );
    assert_eq!(pins(&mesh), pinned);
    assert_unchanged(&before, &mesh.client, "changed by what was refused");
    hbone_works(&mesh);
}

/// There is a directory where only files can be, and a pod has lost its record.
fn uninstall_goes_on_after_a_failure() {
    let mut mesh = Mesh::started(Options::default(), |client, server| {
        Workloads::hbone([client, server])
    });
    let untouched = [&mesh.client, &mesh.server].map(|pod| Footprint::of(&pod.ns));
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.enrol(pod);
    }
    mesh.agent.stop();
    let pods = mesh.agent.state_dir().join("pods");
    fs::remove_file(pods.join(format!("{}.json", mesh.client.uid))).unwrap();
    let stray = pods.join("stray.bad");
    fs::create_dir(&stray).unwrap();
    let (status, output) = mesh.agent.uninstall(&mesh.node, &[]);
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(output.contains(&stray.display().to_string()), "{output}");
    // All else is gone, the pod without a record included: its pins tell of it.
    for (pod, before) in [&mesh.client, &mesh.server].into_iter().zip(&untouched) {
        assert_unchanged(before, pod, "after the uninstallation");
    }
    assert_eq!(pins(&mesh), BTreeSet::new());
    fs::remove_dir(&stray).unwrap();
    let (status, output) = mesh.agent.uninstall(&mesh.node, &[]);
    assert!(status.success(), "{output}");
    assert!(!pods.exists());
}

/// The agent that serves it has other directories.
fn uninstall_leaves_the_socket_of_another_agent() {
    let mesh = Mesh::hbone(Options::default());
    let mut uninstall = process::command(&mesh.node.host.ns, agent::binary().unwrap());
    uninstall.arg("uninstall");
    for (flag, file) in [
        ("--cni-socket", "cni.sock"),
        ("--state-dir", "another-state"),
        ("--bpffs-dir", "another-bpf"),
        ("--cni-conf-dir", "net.d"),
        ("--cni-bin-dir", "cni-bin"),
    ] {
        uninstall.arg(flag).arg(mesh.node.directory().join(file));
    }
    let (status, output) = process::output(&mut uninstall, Duration::from_secs(30));
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(
        output.contains("cni.sock is served by a running agent"),
        "{output}"
    );
    mesh.agent.release(&mesh.client);
    mesh.agent.enrol(&mesh.client);
    hbone_works(&mesh);
}

fn uninstall_of_nothing_is_fine() {
    let mut mesh = Mesh::hbone(Options::default());
    mesh.agent.stop();
    for _ in 0..2 {
        let (status, output) = mesh.agent.uninstall(&mesh.node, &["--remove-ca"]);
        assert!(status.success(), "{output}");
    }
    assert!(!mesh.agent.state_dir().exists());
}
