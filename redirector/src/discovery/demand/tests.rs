use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::*;

/// Of paused time, except where something hangs.
const SOON: Duration = Duration::from_secs(5);

fn name(number: usize) -> ResourceName {
    format!("/10.0.{}.{}", number / 250, number % 250).as_str().into()
}

/// A response that has something for the first, and nothing for the others.
fn answers(present: &[&ResourceName], absent: &[&ResourceName]) -> Answers {
    let texts = |names: &[&ResourceName]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
    Answers {
        present: texts(present).into_iter().collect(),
        absent: texts(absent),
        ..Answers::default()
    }
}

/// With somebody to ask.
fn connected() -> Demand {
    let demand = Demand::default();
    demand.connected();
    demand
}

/// Asks in a task of its own, and returns when the question is there.
async fn asking(asker: &Arc<Asker>, name: &ResourceName) -> tokio::task::JoinHandle<Result<(), Unanswered>> {
    let (asker, name) = (Arc::clone(asker), name.clone());
    let task = tokio::spawn(async move { asker.ask(&name, Instant::now() + SOON).await });
    tokio::task::yield_now().await;
    task
}

#[tokio::test(start_paused = true)]
async fn a_name_is_asked_for_once_and_all_that_wait_hear_the_answer() {
    let demand = connected();
    let askers = [Arc::new(demand.asker()), Arc::new(demand.asker())];
    let first = asking(&askers[0], &name(1)).await;
    timeout(SOON, demand.changed()).await.unwrap();
    assert_eq!(demand.take().subscribe, [name(1).to_string()]);
    let second = asking(&askers[1], &name(1)).await;
    let other = asking(&askers[1], &name(2)).await;
    timeout(SOON, demand.changed()).await.unwrap();
    assert_eq!(demand.take().subscribe, [name(2).to_string()]);
    demand.answer(&answers(&[&name(1)], &[&name(2), &name(9)]));
    for task in [first, second, other] {
        task.await.unwrap().unwrap();
    }
    // What has only just been said needs no deadline.
    for known in [name(1), name(2)] {
        askers[0].ask(&known, Instant::now()).await.unwrap();
    }
    assert_eq!(demand.take(), Changes::default());
    // A new connection is told all of them.
    let mut all = demand.connected();
    all.sort();
    assert_eq!(all, [name(1).to_string(), name(2).to_string()]);
}

#[tokio::test(start_paused = true)]
async fn without_an_answer_the_question_stays_and_whoever_asked_is_told() {
    let demand = connected();
    let asker = Arc::new(demand.asker());
    let error = asking(&asker, &name(1)).await.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("/10.0.0.1"), "{error}");
    assert!(error.to_string().contains("in time"), "{error}");
    // The control plane was away: it is told when it is back, and whoever asks then waits for the same answer.
    assert_eq!(demand.connected(), [name(1).to_string()]);
    let again = asking(&asker, &name(1)).await;
    assert_eq!(demand.take(), Changes::default());
    demand.answer(&answers(&[], &[&name(1)]));
    again.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_asks_for_everything_leaves_room_for_others() {
    let demand = connected();
    let scanner = Arc::new(demand.asker());
    let mut scans = Vec::new();
    for number in 0..3 * PER_POD {
        scans.push(asking(&scanner, &name(number)).await);
    }
    assert_eq!(demand.take().subscribe.len(), PER_POD);
    let other = asking(&Arc::new(demand.asker()), &name(9_000)).await;
    assert_eq!(demand.take().subscribe, [name(9_000).to_string()]);
    sleep(SOON).await;
    for scan in scans {
        scan.await.unwrap().unwrap_err();
    }
    other.await.unwrap().unwrap_err();

    // However many pods there are, and however long nobody answers, questions have an end.
    let mut number = 10_000;
    let error = loop {
        let asker = demand.asker();
        let deadline = Instant::now() + Duration::from_millis(1);
        match asker.ask(&name(number), deadline).await {
            Err(error) if error.reason.contains("too many") => break error,
            _ => number += 1,
        }
        assert!(number < 10_000 + 2 * MAX_ASKED, "no end");
    };
    assert!(error.to_string().contains("without an answer"), "{error}");
    assert_eq!(demand.connected().len(), MAX_ASKED);
}

#[tokio::test(start_paused = true)]
async fn of_names_with_nothing_behind_them_the_oldest_are_given_up() {
    let demand = connected();
    let asker = demand.asker();
    let ask = async |name: &ResourceName, is_there: bool| {
        let waiting = asker.ask(name, Instant::now() + SOON);
        let answering = async {
            tokio::task::yield_now().await;
            match is_there {
                true => demand.answer(&answers(&[name], &[])),
                false => demand.answer(&answers(&[], &[name])),
            }
        };
        tokio::join!(waiting, answering).0.unwrap();
    };
    ask(&name(0), true).await;
    for number in 1..=MAX_EMPTY {
        ask(&name(number), false).await;
    }
    // The first of them has come to be, and is no longer one of them.
    demand.answer(&answers(&[&name(1)], &[]));
    demand.take();
    ask(&name(MAX_EMPTY + 1), false).await;
    assert_eq!(demand.take().unsubscribe, Vec::<String>::new());
    ask(&name(MAX_EMPTY + 2), false).await;
    assert_eq!(
        demand.take(),
        Changes {
            unsubscribe: vec![name(2).to_string()],
            subscribe: vec![name(MAX_EMPTY + 2).to_string()],
        }
    );
    let all: HashSet<_> = demand.connected().into_iter().collect();
    assert_eq!(all.len(), MAX_EMPTY + 2);
    assert!(
        all.contains(name(0).as_str()) && all.contains(name(1).as_str()) && !all.contains(name(2).as_str())
    );
    // What is gone again is empty from then on.
    demand.answer(&answers(&[], &[&name(1)]));
    assert_eq!(demand.take().unsubscribe, [name(3).to_string()]);
    // What was given up is asked for anew.
    ask(&name(2), false).await;
    assert_eq!(demand.take().subscribe, [name(2).to_string()]);
}

#[tokio::test(start_paused = true)]
async fn what_the_mesh_lacks_is_asked_for_again_while_there_is_somebody_to_ask() {
    for is_there in [true, false] {
        let demand = connected();
        let asker = Arc::new(demand.asker());
        let told = || match is_there {
            true => answers(&[&name(1)], &[]),
            false => answers(&[], &[&name(1)]),
        };
        let first = asking(&asker, &name(1)).await;
        demand.take();
        demand.answer(&told());
        first.await.unwrap().unwrap();
        sleep(FRESH).await;
        // It may have come to be since, or have another owner, of which nobody tells unasked. Given up first: what is subscribed to
        // already has no answer.
        let again = asking(&asker, &name(1)).await;
        let changes = demand.take();
        assert_eq!(changes.unsubscribe, [name(1).to_string()]);
        assert_eq!(changes.subscribe, [name(1).to_string()]);
        assert!(!again.is_finished());
        demand.answer(&told());
        again.await.unwrap().unwrap();
        // With nobody to ask, the last answer counts, however old; and nothing does without one.
        sleep(FRESH).await;
        demand.disconnected();
        asker.ask(&name(1), Instant::now()).await.unwrap();
        asker.ask(&name(2), Instant::now() + SOON).await.unwrap_err();
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_not_understood_is_not_nothing() {
    let demand = connected();
    let asker = Arc::new(demand.asker());
    let waiting = asking(&asker, &name(1)).await;
    // By its alias it is here, and it was removed under another.
    let mut told = answers(&[&name(1)], &[&name(1)]);
    told.refused.insert(name(1).to_string());
    demand.answer(&told);
    for error in [
        waiting.await.unwrap().unwrap_err(),
        asker.ask(&name(1), Instant::now()).await.unwrap_err(),
    ] {
        assert!(error.to_string().contains("not understood"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_peers_ask_takes_no_turn_of_the_pod_s_own() {
    let demand = connected();
    let peers = Arc::new(demand.asker_of_peers());
    for number in 0..10 * PER_PEERS {
        asking(&peers, &name(number)).await;
    }
    assert_eq!(demand.take().subscribe.len(), PER_PEERS);
    asking(&Arc::new(demand.asker()), &name(9_000)).await;
    assert_eq!(demand.take().subscribe, [name(9_000).to_string()]);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_is_asked_for_again_and_again_is_one_name() {
    let demand = connected();
    let asker = Arc::new(demand.asker());
    for _ in 0..50 {
        let waiting = asking(&asker, &name(1)).await;
        demand.answer(&answers(&[], &[&name(1)]));
        waiting.await.unwrap().unwrap();
        sleep(FRESH).await;
    }
    assert_eq!(demand.names().empty.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn who_asks_again_has_the_answer_before_when_there_is_nobody_to_ask_any_more() {
    let demand = connected();
    let asker = Arc::new(demand.asker());
    let first = asking(&asker, &name(1)).await;
    demand.answer(&answers(&[], &[&name(1)]));
    first.await.unwrap().unwrap();
    sleep(FRESH).await;
    let again = asking(&asker, &name(1)).await;
    let never = asking(&asker, &name(2)).await;
    demand.disconnected();
    let soon = timeout(Duration::from_millis(1), again).await;
    soon.expect("it waits no longer").unwrap().unwrap();
    assert!(!never.is_finished());
    assert_eq!(demand.names().asked, 1);
    never.await.unwrap().unwrap_err();
}
