use std::{
    io,
    sync::{Arc, Mutex as StdMutex},
};

use super::*;
use crate::{
    mesh::testing::{id, info, policy_name, service, workload},
    proxy::{
        copy::Meter as _,
        flows::Flows,
        metrics::Metrics,
        record::{Direction, Record, Recorder, Security},
    },
    telemetry::logs::{self, Format},
};

#[derive(Clone, Default)]
struct Sink(Arc<StdMutex<Vec<u8>>>);

impl io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What `act` has logged, from `level` up, a line each without its time.
fn logged(level: &str, config: Config, act: impl FnOnce(&Arc<Recorder>)) -> (Vec<String>, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::new(config));
    let recorder = Recorder::new(metrics.clone(), Arc::<Flows>::default(), &info("web"));
    let sink = Sink::default();
    let writer = sink.clone();
    let subscriber = logs::subscriber(&level.parse().unwrap(), Format::Plain, move || writer.clone()).0;
    tracing::subscriber::with_default(subscriber, || act(&recorder));
    let bytes = sink.0.lock().unwrap().clone();
    let text = String::from_utf8(bytes).unwrap();
    let lines = text
        .lines()
        .map(|line| line.split_once('\t').unwrap().1.to_owned());
    (lines.collect(), metrics)
}

fn opened(recorder: &Arc<Recorder>) -> Box<Record> {
    let mut record = Record::new(recorder, Direction::Outbound, "10.4.1.9:41822".parse().unwrap());
    let facts = record.facts();
    facts.dst = Some("10.4.2.7:15008".parse().unwrap());
    facts.hbone_dst = Some("10.4.2.7:8080".into());
    let mut web = workload("web", "10.4.1.9");
    web.cluster_id = "east".into();
    facts.source = (&Arc::new(web)).into();
    facts.source.identity = Some(id("web"));
    facts.destination = (&Arc::new(workload("cart", "10.4.2.7"))).into();
    facts.service = Some(Arc::new(service("cart", "10.9.0.1")));
    facts.redirect = Some(Redirect::Outbound);
    record.open(Security::MutualTls);
    record
}

/// What is before the bytes.
const WHO: &str = "src.addr=10.4.1.9:41822 src.workload=\"web\" src.namespace=\"shop\" \
                   src.identity=\"spiffe://cluster.local/ns/shop/sa/web\" src.cluster=\"east\" dst.addr=10.4.2.7:15008 \
                   dst.hbone_addr=10.4.2.7:8080 dst.service=\"cart.shop.svc.cluster.local\" dst.workload=\"cart\" \
                   dst.namespace=\"shop\" direction=\"outbound\"";

#[test]
fn lines_have_the_form_of_ztunnels() {
    let (lines, _) = logged("access=debug", Config::default(), |recorder| {
        let record = opened(recorder);
        record.decided_by(Some(&policy_name("shop", "lets-in")));
        record.counts().0.add(120);
        record.end(Ok(()));
        opened(recorder).fail(&io::Error::other("no \"port\""));
        Record::new(recorder, Direction::Inbound, "10.4.1.9:1".parse().unwrap())
            .fail(&io::Error::other("no"));
    });
    let rest = "security=\"mutual_tls\" redirect=\"outbound\"";
    let duration = |line: &str| {
        line.split("duration=")
            .nth(1)?
            .split(' ')
            .next()
            .map(str::to_owned)
    };
    for line in [&lines[1], &lines[3]] {
        let duration = duration(line).unwrap();
        let number = duration.strip_prefix('"').unwrap().strip_suffix("ms\"").unwrap();
        number.parse::<u64>().unwrap();
    }
    let timeless = |line: &String| match duration(line) {
        Some(duration) => line.replace(&duration, "TIME"),
        None => line.clone(),
    };
    let lines: Vec<_> = lines.iter().map(timeless).collect();
    assert_eq!(
        lines,
        [
            format!("debug\taccess\tconnection opened\t{WHO} {rest}"),
            format!(
                "info\taccess\tconnection complete\t{WHO} bytes_sent=120 bytes_recv=0 duration=TIME security=\"mutual_tls\" \
                 policy=\"shop/lets-in\" redirect=\"outbound\""
            ),
            format!("debug\taccess\tconnection opened\t{WHO} {rest}"),
            format!(
                "error\taccess\tconnection complete\t{WHO} bytes_sent=0 bytes_recv=0 duration=TIME error=\"no \\\"port\\\"\" {rest} \
                 response_flags=\"CONNECT\""
            ),
            "warn\taccess\tconnection failed\tsrc.addr=10.4.1.9:1 direction=\"inbound\" error=\"no\" response_flags=\"CONNECT\""
                .to_owned(),
        ]
    );
}

#[test]
fn what_the_level_leaves_out_takes_no_place_of_the_rate() {
    let config = Config {
        sample: Share(1.0),
        lines_per_second: 1,
    };
    let (lines, metrics) = logged("access=error", config, |recorder| {
        for _ in 0..5 {
            let refused = Record::new(recorder, Direction::Inbound, "10.4.1.9:1".parse().unwrap());
            refused.fail(&io::Error::other("no"));
            opened(recorder).end(Ok(()));
        }
        opened(recorder).fail(&io::Error::other("no"));
    });
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert_eq!(left_out(&metrics, "rate"), "0");
}

/// How many lines were left out for a reason.
fn left_out(metrics: &Metrics, reason: &str) -> String {
    let text = super::super::metrics::text(metrics);
    let name = format!("redirector_access_lines_left_out_total{{reason=\"{reason}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    line.unwrap().to_owned()
}

#[test]
fn of_a_sample_all_that_fail_are_told_and_of_the_others_their_share() {
    let config = Config {
        sample: "0.25".parse().unwrap(),
        lines_per_second: 0,
    };
    let (lines, metrics) = logged("access=debug", config, |recorder| {
        for _ in 0..1_000 {
            opened(recorder).end(Ok(()));
        }
        for _ in 0..10 {
            opened(recorder).fail(&io::Error::other("no"));
        }
    });
    let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    // A connection has both lines or neither.
    let told = count("info\taccess\tconnection complete");
    assert!((240..=260).contains(&told), "{told}");
    assert!((told..=told + 10).contains(&count("connection opened")));
    assert_eq!(count("error\taccess\tconnection complete"), 10);
    let left: usize = left_out(&metrics, "sample").parse().unwrap();
    assert_eq!(left, 2_010 - told - count("connection opened"));
    for (text, share) in [("0", 0), ("1", 500), ("0.5", 250)] {
        let sample: Share = text.parse().unwrap();
        let had = (0..500).filter(|&number| sample.has(number)).count();
        assert!(had.abs_diff(share) < 5, "{text}: {had}");
    }
    for bad in ["", "x", "-0.1", "1.1", "NaN", "inf"] {
        assert!(bad.parse::<Share>().is_err(), "{bad:?}");
    }
}

#[test]
fn a_second_has_so_many_places_and_the_next_one_tells_what_found_none() {
    let began = Instant::now();
    let mut window = Window {
        began,
        written: 0,
        left_out: 0,
    };
    let mut place = |millis| window.place(began + Duration::from_millis(millis), 2);
    let places = [0, 500, 600, 999, 1_000, 1_001, 1_002].map(&mut place);
    assert_eq!(places, [Some(0), Some(0), None, None, Some(2), Some(0), None]);
}

#[test]
fn what_is_too_much_is_counted_and_what_nobody_wants_takes_no_place() {
    let config = Config {
        lines_per_second: 3,
        ..Config::default()
    };
    // Within a second, unless this thread sleeps for it: then there are more places.
    let (lines, metrics) = logged("access=info", config, |recorder| {
        (0..50).for_each(|_| opened(recorder).end(Ok(())));
    });
    let told = lines.iter().filter(|line| line.contains("complete")).count();
    assert!(told >= 3, "{lines:?}");
    assert_eq!(left_out(&metrics, "rate"), (50 - told).to_string());
    let (lines, metrics) = logged("access=error", config, |recorder| {
        (0..50).for_each(|_| opened(recorder).end(Ok(())));
        opened(recorder).fail(&io::Error::other("no"));
    });
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert_eq!(left_out(&metrics, "rate"), "0");
}
