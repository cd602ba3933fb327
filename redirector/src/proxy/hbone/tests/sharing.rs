//! How connections are shared, kept, and given up.

use super::*;

#[tokio::test]
async fn a_crowd_makes_one_connection_at_a_time_and_no_more_than_it_needs() {
    let world = Arc::new(World::new(Http2Config::default(), PoolConfig::default(), echo));
    let crowd: Vec<_> = (0..1000)
        .map(|_| {
            let world = world.clone();
            tokio::spawn(async move { world.open("10.1.2.3:80").await.unwrap() })
        })
        .collect();
    let mut open = Vec::new();
    for stream in crowd {
        open.push(stream.await.unwrap());
    }
    assert_eq!(world.most_dialling.load(Ordering::SeqCst), 1);
    // All are open at a time, 100 to a connection.
    assert_eq!(world.dials(), 10);
    drop(open);
    echoes(&mut world.open("10.1.2.3:80").await.unwrap(), b"again").await;
    assert_eq!(
        world.dials(),
        10,
        "full connections serve again once they are not"
    );
}

#[tokio::test]
async fn fewer_streams_than_ours_are_kept_to_once_the_peer_says_so() {
    let http2 = Http2Config {
        max_streams: 3,
        ..Http2Config::default()
    };
    let world = World::new(http2, PoolConfig::default(), echo);
    let mut open = Vec::new();
    for _ in 0..7 {
        open.push(world.open("10.1.2.3:80").await.unwrap());
    }
    assert_eq!(world.dials(), 3);
}

#[tokio::test]
async fn other_identities_workloads_or_places_are_other_connections() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), echo);
    let mut keys = vec![key(); 5];
    keys[1].source = "spiffe://td/ns/shop/sa/other".parse().unwrap();
    keys[2].expected = ["spiffe://td/ns/shop/sa/other".parse().unwrap()].into();
    keys[3].tunnel = "10.1.2.4:15008".parse().unwrap();
    keys[4].workload = WorkloadUid("c//Pod/shop/cart-1".into());
    for round in 1..=2 {
        for key in &keys {
            world
                .pool
                .open(key, &request("10.1.2.3:80"), || world.dial())
                .await
                .unwrap();
        }
        assert_eq!(world.dials(), 5, "round {round}");
    }
}

#[tokio::test]
async fn a_failure_is_shared_by_those_who_waited_for_it_and_then_forgotten() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), echo);
    let tunnel: SocketAddr = TUNNEL.parse().unwrap();
    let tried = AtomicUsize::new(0);
    let fail = || async {
        tried.fetch_add(1, Ordering::SeqCst);
        tokio::task::yield_now().await;
        Err::<Dialled<DuplexStream>, _>(Error::ConnectTimeout {
            tunnel,
            after: Duration::from_secs(10),
        })
    };
    let (key, request) = (key(), request("10.1.2.3:80"));
    let crowd = (0..50).map(|_| world.pool.open(&key, &request, fail));
    for end in futures_util::future::join_all(crowd).await {
        let text = end.unwrap_err().to_string();
        assert!(text.contains("NetworkPolicy") && text.contains("15008"), "{text}");
    }
    assert_eq!(tried.load(Ordering::SeqCst), 1);
    assert!(world.pool.open(&key, &request, fail).await.is_err());
    assert_eq!(tried.load(Ordering::SeqCst), 2, "a later call tries anew");
    assert_eq!(world.pool.peer_count(), 0);
    world.open("10.1.2.3:80").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_request_without_an_answer_ends_and_condemns_its_connection() {
    let kept = Mutex::new(Vec::new());
    let world = World::new(Http2Config::default(), PoolConfig::default(), move |connect| {
        if connect.authority().ends_with(":80") {
            echo(connect)
        } else {
            kept.lock().unwrap().push(connect)
        }
    });
    let error = world.open("10.1.2.3:99").await.unwrap_err();
    assert!(matches!(&*error, Error::ResponseTimeout { .. }), "{error}");
    echoes(&mut world.open("10.1.2.3:80").await.unwrap(), b"hello").await;
    assert_eq!(world.dials(), 2);
}

#[tokio::test(start_paused = true)]
async fn unused_connections_are_released_and_used_ones_are_not() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), echo);
    let mut stream = world.open("10.1.2.3:80").await.unwrap();
    sleep(Duration::from_secs(3600)).await;
    echoes(&mut stream, b"still here").await;
    drop(stream);
    sleep(Duration::from_secs(200)).await;
    drop(world.open("10.1.2.3:80").await.unwrap());
    assert_eq!(world.dials(), 1);
    // How the server puts it depends on whether it gets its own last frame out.
    let _ = world.last_server().task.await.unwrap();
    assert_eq!(world.pool.peer_count(), 0);
    world.tasks.close();
    world.tasks.wait().await;
}

#[tokio::test]
async fn the_end_of_the_pod_ends_all_connections() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), echo);
    let mut stream = world.open("10.1.2.3:80").await.unwrap();
    world.kill.cancel();
    world.tasks.close();
    world.tasks.wait().await;
    assert_eq!(
        stream.source.chunk().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionAborted
    );
    assert_eq!(world.pool.peer_count(), 0);
}
