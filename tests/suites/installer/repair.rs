//! An agent that keeps the plugin installed.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use redirector_tests::{
    agent::{Agent, binary},
    cni,
    node::Node,
    process::{command, output},
    wait,
    workloads::Workloads,
};

use super::{CONF, Cni, DEADLINE, LIST, readiness, runtime, wait_chained};

/// What somebody does to a CNI's directories.
type Harm = fn(&Cni);

/// Its socket is served before a runtime is told of the plugin; it waits for a configuration, and puts back what is missing.
pub(crate) fn an_agent_repairs_what_is_changed() {
    let node = Node::new();
    let cni = Cni::create(node.directory());
    let options = redirector_tests::agent::Options {
        unready: true,
        ..cni.agent(&[])
    };
    let mut agent = Agent::start(&node, &Workloads::default(), options);
    wait::until("the agent to say what it waits for", || {
        let (status, text) = readiness(&node);
        let says = text.contains("CNI plugin not installed yet")
            && text.contains("there is no CNI configuration yet");
        (status == 500 && says).then_some(())
    });
    cni.replace("10-net.conf", CONF);
    wait::until("an entry", || cni.is_chained().then_some(()));
    let answer =
        cni::post(&agent.cni_socket(), "/cmdadd", "{}").expect("whoever is told of it can be served");
    assert_eq!(answer.status, 400, "{answer:?}");
    wait::until("the agent to be ready", || {
        (readiness(&node).0 == 200).then_some(())
    });
    let mut status = command(&node.host.ns, binary().expect("the suite needs it"));
    let (_, said) = output(status.arg("status"), DEADLINE);
    assert!(
        said.contains(&format!(
            "CNI plugin installed in {}",
            cni.conf.join("10-net.conflist").display()
        )),
        "{said}"
    );
    // The program that lies there is one that a runtime can use.
    let mut plugin = command(&node.host.ns, cni.bin.join("redirector-cni"));
    let (ended, said) = output(plugin.env("CNI_COMMAND", "VERSION"), DEADLINE);
    assert!(ended.success() && said.contains("supportedVersions"), "{said}");

    let harms: [(&str, Harm); 7] = [
        ("its owner writes it again", |cni| {
            cni.replace("10-net.conf", CONF)
        }),
        ("the binary is gone", |cni| {
            fs::remove_file(cni.bin.join("redirector-cni")).unwrap()
        }),
        ("the binary is cut", |cni| {
            fs::write(cni.bin.join("redirector-cni"), "x").unwrap()
        }),
        ("the list is gone", |cni| {
            fs::remove_file(cni.conf.join("10-net.conflist")).unwrap()
        }),
        ("it is written in place", |cni| cni.write("10-net.conflist", LIST)),
        ("another CNI comes", |cni| cni.replace("05-new.conflist", LIST)),
        ("and goes", |cni| {
            fs::remove_file(cni.conf.join("05-new.conflist")).unwrap()
        }),
    ];
    for (harm, act) in harms {
        act(&cni);
        // Back-off may have come by the last of so many in a row.
        wait_chained(&cni, &agent);
        wait::until(harm, || {
            let entries = cni
                .names()
                .iter()
                .filter(|name| cni.read(name).contains("agentSocket"))
                .count();
            (entries == 1 && cni.is_chained()).then_some(())
        });
    }
    // Without --daemonset a stop is a restart.
    agent.stop();
    assert!(cni.is_chained() && cni.has_binary());
}

/// Somebody writes the file again whenever it changes: the agent says so and waits longer and longer, and wins when that ends.
pub(crate) fn an_agent_that_is_fought_does_not_spin() {
    const WAR: Duration = Duration::from_secs(15);
    let node = Node::new();
    let cni = Arc::new(Cni::create(node.directory()));
    cni.write("10-net.conflist", LIST);
    let agent = Agent::start(&node, &Workloads::default(), cni.agent(&[]));
    let stop = Arc::new(AtomicBool::new(false));
    let rewriter = {
        let (cni, stop) = (Arc::clone(&cni), Arc::clone(&stop));
        thread::spawn(move || {
            let end = Instant::now() + WAR + wait::DEADLINE;
            while !stop.load(Ordering::Relaxed) && Instant::now() < end {
                if cni.read("10-net.conflist") != LIST {
                    cni.replace("10-net.conflist", LIST);
                }
                thread::sleep(Duration::from_millis(10));
            }
        })
    };
    let begun = Instant::now();
    wait::until("a warning", || {
        agent.log().contains("undoes what is written to").then_some(())
    });
    while begun.elapsed() < WAR {
        assert!(!wait::interrupted());
        thread::sleep(Duration::from_millis(100));
    }
    let log = agent.log();
    stop.store(true, Ordering::Relaxed);
    rewriter.join().unwrap();
    let installed = log.matches("CNI plugin installed").count();
    assert!(installed < 12, "{installed} times in {WAR:?}");
    let warnings: Vec<_> = log
        .lines()
        .filter(|line| line.contains("undoes what is written to"))
        .collect();
    assert!(warnings.len() < 12, "{warnings:#?}");
    assert!(
        warnings[0].contains("10-net.conflist") && warnings[0].contains("--cni-owned-config"),
        "{warnings:?}"
    );
    wait::within(4 * wait::DEADLINE, "the end of the war", || {
        cni.is_chained().then_some(())
    });
}

pub(crate) fn a_copy_outlives_the_agent_and_follows_its_original() {
    let node = Node::new();
    let cni = Cni::create(node.directory());
    cni.write("10-net.conf", CONF);
    let mut agent = Agent::start(&node, &Workloads::default(), cni.agent(&["--cni-owned-config"]));
    assert!(cni.is_chained() && cni.read("02-redirector.conflist").contains("redirector-cni"));
    assert_eq!(cni.read("10-net.conf"), CONF, "the CNI's own is left alone");
    agent.kill();
    // A reboot: the CNI comes later than the runtime, and pods find the copy.
    fs::remove_file(cni.conf.join("10-net.conf")).unwrap();
    assert!(cni.is_chained());
    agent.restart(&node);
    let newer = CONF.replace("\"net\"", "\"net\", \"mtu\": 9000");
    cni.replace("10-net.conf", &newer);
    wait::until("the copy to follow", || {
        (cni.read("02-redirector.conflist").contains("9000") && cni.is_chained()).then_some(())
    });
    assert_eq!(cni.read("10-net.conf"), newer);
    agent.stop();
    assert!(runtime::network(&cni.conf).is_ok_and(|plugins| plugins.len() == 2));
}
