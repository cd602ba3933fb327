//! A mesh by xDS as it comes and goes: the first state late and in parts, beside a file, and how soon a change counts.

use std::{
    fs,
    io::Read as _,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use redirector_tests::{
    ads::{ADDRESS, AUTHORIZATION, Ads, deny, workload},
    agent::Options,
    app::{self, App},
    control_plane::{Ground, echoes, open},
    mesh::PORT,
    node::Family,
    proto::workload as proto,
    suite::{Needs, case, main as suite},
    wait,
    workloads::Workloads,
};

fn main() -> ExitCode {
    let cases = vec![
        case(
            "what_has_not_come_is_named_and_lets_in_nobody",
            what_has_not_come_is_named_and_lets_in_nobody,
        ),
        case(
            "a_first_state_in_parts_is_taken_as_it_comes",
            a_first_state_in_parts_is_taken_as_it_comes,
        ),
        case(
            "the_file_counts_before_the_control_plane",
            the_file_counts_before_the_control_plane,
        ),
        case("how_soon_a_change_counts", how_soon_a_change_counts),
    ];
    suite(Needs::Agent, 2, cases)
}

fn what_has_not_come_is_named_and_lets_in_nobody() {
    for (withheld, told) in [(AUTHORIZATION, ADDRESS), (ADDRESS, AUTHORIZATION)] {
        let ground = Ground::new();
        let ads = Ads::start(&ground.node.host.ns, &ground.credentials());
        ads.edit(|edit| {
            edit.pods([&ground.client, &ground.server]);
            edit.policy(&deny("demo"));
        });
        ads.withhold(withheld);
        let options = Options {
            environment: ads.environment(),
            unready: true,
            ..Options::default()
        };
        let demo = ground.start_with(options, &Workloads::default());
        let _who = demo.serve(Family::V4, app::who);
        assert_eq!(ads.answered(told), None);
        let (status, text) = demo.readiness();
        assert_eq!(status, 500, "{text}");
        assert!(text.contains(withheld) && !text.contains(told), "{text}");
        // Without the policies that guard them, pods would be an open door.
        let stranger = demo.node.pod("stranger");
        let at_server = || app::ask_who(&stranger.ns, demo.server.addr(Family::V4, PORT));
        let asked = demo.ask(Family::V4);
        assert!(asked.is_err(), "{asked:?} while {withheld} has not come");
        if withheld == AUTHORIZATION {
            let asked = at_server();
            assert!(asked.is_err(), "{asked:?} in plain");
            let log = demo.agent.access_log();
            let mut errors = log.iter().filter_map(|entry| entry.get("error"));
            assert!(
                errors.any(|error| error.contains("has not told its policies")),
                "{log:?}"
            );
        }
        wait::until("a warning", || {
            let log = demo.agent.log();
            let mut lines = log
                .lines()
                .filter(|line| line.contains("not ready: the control plane"));
            lines
                .any(|line| line.contains(withheld) && !line.contains(told))
                .then_some(())
        });
        ads.release();
        assert_eq!(ads.answered(withheld), None);
        wait::until("the agent to be ready", || {
            (demo.readiness().0 == 200).then_some(())
        });
        assert!(demo.parts(Family::V4).contains("401"));
        ads.edit(|edit| edit.remove(AUTHORIZATION, "demo/deny"));
        demo.meets(Family::V4);
        assert_eq!(at_server().unwrap(), stranger.v4.to_string());
        assert_eq!(ads.connections(), 1);
    }
}

/// ztunnel is ready with the first response of each type, and so are we: a control plane that has more to say says it later.
fn a_first_state_in_parts_is_taken_as_it_comes() {
    let ground = Ground::new();
    let ads = Ads::start(&ground.node.host.ns, &ground.credentials());
    ads.edit(|edit| edit.pods([&ground.client, &ground.server]));
    ads.hold_back(1);
    let demo = ground.start(ads.environment(), &Workloads::default());
    let _who = demo.serve(Family::V4, app::who);
    assert_eq!(ads.answered(ADDRESS), None);
    assert_eq!(demo.readiness().0, 200);
    assert_eq!(demo.dump()["counts"]["workloads"], 1);
    ads.release();
    wait::until("the rest", || {
        (demo.dump()["counts"]["workloads"] == 2).then_some(())
    });
    demo.meets(Family::V4);
    let answers = ads
        .requests()
        .into_iter()
        .filter(|request| request.type_url == ADDRESS && !request.response_nonce.is_empty());
    assert_eq!(answers.count(), 2);
}

fn the_file_counts_before_the_control_plane() {
    let ground = Ground::new();
    let ads = Ads::start(&ground.node.host.ns, &ground.credentials());
    let by_plane = workload(&ground.server);
    let mut elsewhere = by_plane.clone();
    elsewhere.addresses = vec![vec![10, 77, 255, 1]];
    ads.edit(|edit| {
        edit.workload(workload(&ground.client));
        edit.workload(elsewhere);
        edit.policy(&deny("demo"));
    });
    // The server as a workload that takes HBONE, and a policy that denies nobody, under the control plane's keys.
    let nobody = serde_json::json!({"namespaces": [{"Exact": "nobody"}]});
    let file = Workloads::hbone([&ground.server]).with_workload("other", &[[192, 0, 2, 9].into()], "TCP");
    let with_policy = file.clone().with_policy("deny", "Deny", &[nobody]);
    let demo = ground.start(ads.environment(), &with_policy);
    let _who = demo.serve(Family::V4, app::who);
    demo.meets(Family::V4);
    let write = |workloads: &Workloads| {
        // In one step, as editors do.
        let path = demo.node.directory().join("workloads.yaml");
        let new = path.with_extension("new");
        workloads.write(&new).unwrap();
        fs::rename(&new, &path).unwrap();
    };
    // A key that the file gives up is the control plane's again, at its newest.
    write(&file);
    assert!(demo.parts(Family::V4).contains("401"));
    write(&with_policy);
    demo.meets(Family::V4);
    // What changes beneath is not seen, and there when it is.
    ads.edit(|edit| edit.remove(AUTHORIZATION, "demo/deny"));
    ads.edit(|edit| edit.workload(by_plane));
    assert_eq!(ads.answered(ADDRESS), None);
    demo.meets(Family::V4);
    assert_eq!(demo.dump()["counts"]["workloads"], 3);
    write(&Workloads::default());
    wait::until("the file to be read", || {
        (demo.dump()["counts"]["workloads"] == 2).then_some(())
    });
    demo.meets(Family::V4);
    ads.edit(|edit| edit.policy(&deny("demo")));
    assert!(demo.parts(Family::V4).contains("401"));
}

/// From the control plane's change to what connections see of it; printed, since a time on a shared machine is no promise.
fn how_soon_a_change_counts() {
    const CHANGES: usize = 50;
    let ground = Ground::new();
    let ads = Ads::start(&ground.node.host.ns, &ground.credentials());
    ads.edit(|edit| edit.pods([&ground.client, &ground.server]));
    let demo = ground.start(ads.environment(), &Workloads::default());
    let _echo = demo.serve(Family::V4, app::echo);
    let ask = || app::ask(&demo.client.ns, demo.server.addr(Family::V4, PORT), "hello\n");
    wait::until("the pods to meet", || ask().ok());
    let [mut denied, mut closed, mut permitted, mut known] = [const { Vec::new() }; 4];
    for _ in 0..CHANGES {
        let stream = open(&demo, Family::V4);
        echoes(&stream).unwrap();
        let change = Instant::now();
        ads.edit(|edit| edit.policy(&deny("demo")));
        let watch = thread::spawn(move || {
            let end = (&stream).read(&mut [0; 1]);
            (end.map_or(0, |bytes| bytes), change.elapsed())
        });
        denied.push(soon(change, || ask().is_err()));
        let (bytes, time) = watch.join().unwrap();
        assert!(
            bytes == 0 && time < app::IO_DEADLINE,
            "the open connection was not closed"
        );
        closed.push(time);
        let change = Instant::now();
        ads.edit(|edit| edit.remove(AUTHORIZATION, "demo/deny"));
        permitted.push(soon(change, || ask().is_ok()));
    }
    // A service whose port leads to one application of the server's, and then to the other.
    let _who = App::start(&demo.server.ns, (Family::V4.any(), PORT + 1).into(), app::who);
    let vip = std::net::Ipv4Addr::new(10, 96, 0, 9);
    let addresses = vec![proto::NetworkAddress {
        address: vip.octets().to_vec(),
        ..Default::default()
    }];
    let port = |target_port: u16| proto::Port {
        service_port: 80,
        target_port: target_port.into(),
        app_protocol: 0,
    };
    ads.edit(|edit| {
        edit.service(proto::Service {
            name: "echo".into(),
            namespace: "demo".into(),
            hostname: "echo.demo".into(),
            addresses,
            ports: vec![port(PORT)],
            ..Default::default()
        });
    });
    for number in 0..CHANGES {
        let (target, expected) = match number % 2 {
            0 => (PORT + 1, format!("hello {}", demo.client.v4)),
            _ => (
                PORT,
                "hello
"
                .to_owned(),
            ),
        };
        let mut server = workload(&demo.server);
        let ports = vec![port(target)];
        server
            .services
            .insert("demo/echo.demo".into(), proto::PortList { ports });
        let change = Instant::now();
        ads.edit(|edit| edit.workload(server));
        let at_service = || {
            app::ask(
                &demo.client.ns,
                (vip, 80).into(),
                "hello
",
            )
        };
        known.push(soon(change, || {
            at_service().is_ok_and(|answer| answer == expected)
        }));
    }
    for (what, mut times) in [
        ("a policy that denies, for new connections", denied),
        ("the same, for an open one", closed),
        ("its end, for new connections", permitted),
        ("another target port of a workload", known),
    ] {
        times.sort_unstable();
        let [median, max] = [CHANGES / 2, CHANGES - 1].map(|at| times[at].as_secs_f64() * 1e3);
        println!("{what}: median {median:.1} ms, longest {max:.1} ms of {CHANGES}");
    }
}

/// How long after `change` it is so.
fn soon(change: Instant, mut is_so: impl FnMut() -> bool) -> Duration {
    while !is_so() {
        assert!(change.elapsed() < wait::DEADLINE, "the change is not seen");
    }
    change.elapsed()
}
