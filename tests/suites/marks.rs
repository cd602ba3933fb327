//! Applications with CAP_NET_ADMIN that use our own marks, and bind their sockets to devices: nothing of theirs leaves the pod past the
//! proxy. Both families, three ways to attach.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    process::ExitCode,
    time::Duration,
};

use redirector_common::consts::{MARK_APP, MARK_LOOP, MARK_PROXY};
use redirector_tests::{
    agent::Options,
    app::{self, App},
    capture::{contains, opened_ports},
    mesh::{Mesh, PORT},
    node::{Family, Host},
    suite::{Case, Needs, case, main as suite},
};
use socket2::{Domain, Socket, Type};

/// Ours, and ours with bits of somebody else's.
const MARKS: [u32; 5] = [0, MARK_PROXY.0, MARK_LOOP.0, MARK_APP.0, 0x7000 | MARK_PROXY.0];
const DEVICES: [Option<&str>; 3] = [None, Some("eth0"), Some("lo")];

type Test = fn(Family, Options);

const TESTS: &[(&str, Test)] = &[
    ("no_mark_or_device_lets_out", no_mark_or_device_lets_out),
    (
        "no_mark_lets_out_without_the_agent",
        no_mark_lets_out_without_the_agent,
    ),
    (
        "a_mark_that_comes_later_changes_nothing",
        a_mark_that_comes_later_changes_nothing,
    ),
    ("no_mark_lets_in", no_mark_lets_in),
];

fn main() -> ExitCode {
    let clsact = Options {
        force_clsact: true,
        ..Options::default()
    };
    let mut cases: Vec<Case> = Vec::new();
    for (attach, options) in [
        ("tcx", Options::default()),
        ("clsact", clsact),
        ("old_kernel", Options::old_kernel()),
    ] {
        for family in Family::BOTH {
            for (name, test) in TESTS {
                let options = options.clone();
                let name = format!("{name}_{}_{attach}", family.name());
                cases.push(case(name, move || test(family, options)));
            }
        }
    }
    suite(Needs::Agent, 2, cases)
}

/// Connects as an application with all rights may.
fn connect(from: &Host, to: SocketAddr, mark: u32, device: Option<&str>) -> io::Result<TcpStream> {
    from.ns.run(|| {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.set_mark(mark)?;
        socket.bind_device(device.map(str::as_bytes))?;
        socket.connect_timeout(&to.into(), patience(device))?;
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(app::IO_DEADLINE))?;
        stream.set_write_timeout(Some(app::IO_DEADLINE))?;
        Ok(stream)
    })
}

/// What is bound to lo leaves by lo, where nobody answers: such an application waits by its own choice, and we do not wait with it.
fn patience(device: Option<&str>) -> Duration {
    if device == Some("lo") {
        Duration::from_millis(300)
    } else {
        app::CONNECT_DEADLINE
    }
}

fn ask(mut stream: TcpStream) -> io::Result<String> {
    stream.write_all(b"in-plain\n")?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Each combination is captured, or fails; without any of them it is captured.
fn no_mark_or_device_lets_out(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::who);
    let capture = mesh.node.capture(&mesh.client);
    let mut captured = 0;
    for device in DEVICES {
        for mark in MARKS {
            let answer = connect(&mesh.client, mesh.server.addr(family, PORT), mark, device).and_then(ask);
            match answer {
                Ok(answer) => {
                    let expected = format!("in-plain {}", mesh.client.ip(family));
                    assert_eq!(answer, expected, "mark {mark:#x}, device {device:?}");
                    captured += 1;
                }
                // Marks that route to lo, and lo itself, need not lead anywhere.
                Err(error) => assert!(
                    device == Some("lo") || [MARK_LOOP.0, MARK_APP.0].contains(&mark),
                    "mark {mark:#x}, device {device:?}: {error}"
                ),
            }
        }
    }
    assert!(captured > 0);
    let segments = capture.stop();
    assert_eq!(opened_ports(&segments), [15008]);
    assert!(!contains(&segments, b"in-plain"));
}

fn no_mark_lets_out_without_the_agent(family: Family, options: Options) {
    let mut mesh = Mesh::hbone(options);
    let _apps = [&*mesh.server, &mesh.node.outside]
        .map(|host| App::start(&host.ns, (family.any(), PORT).into(), app::who));
    mesh.agent.kill();
    let capture = mesh.node.capture(&mesh.client);
    for to in [&*mesh.server, &mesh.node.outside] {
        for device in DEVICES {
            for mark in MARKS {
                let answer = connect(&mesh.client, to.addr(family, PORT), mark, device).and_then(ask);
                let error = answer.expect_err("nobody is there");
                assert!(
                    device == Some("lo") || error.kind() != io::ErrorKind::TimedOut,
                    "mark {mark:#x}, device {device:?} hangs"
                );
            }
        }
    }
    let segments = capture.stop();
    assert_eq!(opened_ports(&segments), [0_u16; 0]);
    assert!(!contains(&segments, b"in-plain"));
}

fn a_mark_that_comes_later_changes_nothing(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::echo);
    let capture = mesh.node.capture(&mesh.client);
    let mut stream = connect(&mesh.client, mesh.server.addr(family, PORT), 0, None).unwrap();
    for mark in MARKS {
        mesh.client
            .ns
            .run(|| socket2::SockRef::from(&stream).set_mark(mark))
            .unwrap();
        let mut answer = [0; 8];
        stream.write_all(b"in-plain").unwrap();
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"in-plain", "mark {mark:#x}");
    }
    drop(stream);
    assert!(!contains(&capture.stop(), b"in-plain"));
}

/// A mark does not cross a veth: what another pod sets is nothing in this one.
fn no_mark_lets_in(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::who);
    for mark in MARKS {
        for from in [&*mesh.stranger, &mesh.node.outside] {
            let before = mesh.agent.access_log().len();
            let stream = connect(from, mesh.server.addr(family, PORT), mark, None).unwrap();
            let answer = ask(stream).unwrap();
            assert_eq!(answer, format!("in-plain {}", from.ip(family)), "mark {mark:#x}");
            redirector_tests::wait::until("the access log", || {
                (mesh.agent.access_log().len() > before).then_some(())
            });
        }
    }
}
