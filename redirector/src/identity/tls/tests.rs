use std::io;

use rcgen::{ExtendedKeyUsagePurpose, SanType};
use rustls::ProtocolVersion;
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;
use crate::{
    identity::{
        crl_file::Revocations,
        testing::{Leaf, TestCa, id, serial},
    },
    mesh::spiffe::Aliases,
};

/// What a handshake told the two sides.
#[derive(Debug)]
struct Outcome {
    client: Result<Seen, String>,
    server: Result<Seen, String>,
}

#[derive(Debug)]
struct Seen {
    peer: Option<SpiffeId>,
    alpn: Option<Vec<u8>>,
    suite: rustls::CipherSuite,
    resumed: bool,
}

impl Seen {
    fn of(connection: &rustls::CommonState) -> Self {
        assert_eq!(connection.protocol_version(), Some(ProtocolVersion::TLSv1_3));
        Self {
            peer: connection.peer_certificates().and_then(peer_identity),
            alpn: connection.alpn_protocol().map(Into::into),
            suite: connection.negotiated_cipher_suite().unwrap().suite(),
            resumed: connection.handshake_kind() == Some(rustls::HandshakeKind::Resumed),
        }
    }
}

/// A handshake, and a byte each way: in TLS 1.3 a client learns only then that it was refused.
async fn handshake(client: Arc<ClientConfig>, server: ServerConfig) -> Outcome {
    let (near, far) = duplex(64 * 1024);
    let client = async {
        let name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
        let mut stream = TlsConnector::from(client).connect(name, near).await?;
        stream.write_all(b"?").await?;
        stream.read_u8().await?;
        Ok(Seen::of(stream.get_ref().1))
    };
    let server = async {
        let mut stream = TlsAcceptor::from(Arc::new(server)).accept(far).await?;
        stream.read_u8().await?;
        stream.write_all(b"!").await?;
        stream.flush().await?;
        Ok(Seen::of(stream.get_ref().1))
    };
    let (client, server) = tokio::join!(client, server);
    let text = |result: io::Result<Seen>| result.map_err(|error| error.to_string());
    Outcome {
        client: text(client),
        server: text(server),
    }
}

fn credentials(ca: &TestCa, name: &str) -> Credentials {
    Credentials::new(&ca.svid(&id(name))).unwrap()
}

/// The client side, with nothing checked and any certificate.
fn lax_client(leaf: Option<Leaf>) -> ClientConfig {
    #[derive(Debug)]
    struct Anyone;
    impl ServerCertVerifier for Anyone {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, rustls::Error> {
            Ok(ServerCertVerified::assertion())
        }
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Ok(HandshakeSignatureValid::assertion())
        }
        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Ok(HandshakeSignatureValid::assertion())
        }
        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            PROVIDER.signature_verification_algorithms.supported_schemes()
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anyone));
    let mut config = match leaf {
        Some(leaf) => builder
            .with_client_auth_cert(vec![leaf.certificate], leaf.key)
            .unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    config
}

/// The server side, with nothing checked and any certificate.
fn lax_server(leaf: Leaf) -> ServerConfig {
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![leaf.certificate], leaf.key)
        .unwrap();
    config.alpn_protocols = vec![ALPN.to_vec()];
    config
}

fn expired(params: &mut rcgen::CertificateParams) {
    params.not_after = (SystemTime::now() - Duration::from_secs(10)).into();
}

fn not_yet_valid(params: &mut rcgen::CertificateParams) {
    params.not_before = (SystemTime::now() + Duration::from_secs(600)).into();
}

#[tokio::test]
async fn both_sides_learn_who_the_other_is() {
    let ca = TestCa::new();
    let server = credentials(&ca, "cart");
    for expected in [vec![id("cart")], vec![id("other"), id("cart")]] {
        let client = Arc::new(credentials(&ca, "web").client_config(&expected).unwrap());
        // Twice, for a session that could be resumed.
        for _ in 0..2 {
            let outcome = handshake(Arc::clone(&client), server.server_config().unwrap()).await;
            let (client, server) = (outcome.client.unwrap(), outcome.server.unwrap());
            assert_eq!((client.peer, server.peer), (Some(id("cart")), Some(id("web"))));
            assert_eq!(client.alpn.as_deref(), Some(ALPN));
            assert_eq!(client.suite, rustls::CipherSuite::TLS13_AES_256_GCM_SHA384);
            assert!(!client.resumed && !server.resumed);
        }
    }
}

#[tokio::test]
async fn an_intermediate_is_sent_along() {
    let root = TestCa::new();
    let intermediate = root.intermediate();
    let mut svid = intermediate.svid(&id("cart"));
    svid.chain.push(intermediate.certificate());
    svid.roots = vec![root.certificate()];
    let server = Credentials::new(&svid).unwrap().server_config().unwrap();
    let client = credentials(&root, "web").client_config(&[id("cart")]).unwrap();
    let outcome = handshake(Arc::new(client), server).await;
    assert!(outcome.client.is_ok() && outcome.server.is_ok(), "{outcome:?}");
}

#[tokio::test]
async fn servers_that_are_not_the_one_expected_are_refused() {
    let (ca, foreign) = (TestCa::new(), TestCa::new());
    let cart = id("cart").to_string();
    let expected = [id("cart")];
    let server_auth_only = |params: &mut rcgen::CertificateParams| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    };
    let client_auth_only = |params: &mut rcgen::CertificateParams| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    };
    let dns = |params: &mut rcgen::CertificateParams| {
        params
            .subject_alt_names
            .push(SanType::DnsName("cart".try_into().unwrap()));
    };
    let other_first = [
        "https://example.org/",
        "spiffe://cluster.local/ns/shop/sa/alias",
        &cart,
    ];
    for (case, leaf, expected, error) in [
        ("good", ca.leaf(&[&cart], server_auth_only), &expected[..], None),
        ("a later SAN", ca.leaf(&other_first, dns), &expected, None),
        (
            "nobody expected",
            ca.leaf(&[&cart], |_| {}),
            &[],
            Some("the server is spiffe"),
        ),
        (
            "other account",
            ca.leaf(&[&id("web").to_string()], |_| {}),
            &expected,
            Some("sa/web, not spiffe"),
        ),
        (
            "other domain",
            ca.leaf(&["spiffe://td/ns/shop/sa/cart"], |_| {}),
            &expected,
            Some("spiffe://td/"),
        ),
        (
            "other case",
            ca.leaf(&["spiffe://cluster.local/ns/shop/sa/Cart"], |_| {}),
            &expected,
            Some("Cart, not"),
        ),
        (
            "longer",
            ca.leaf(&[&format!("{cart}/x")], |_| {}),
            &expected,
            Some("the server is nobody"),
        ),
        (
            "no SAN",
            ca.leaf(&[], |_| {}),
            &expected,
            Some("the server is nobody"),
        ),
        (
            "foreign",
            foreign.leaf(&[&cart], |_| {}),
            &expected,
            Some("UnknownIssuer"),
        ),
        ("expired", ca.leaf(&[&cart], expired), &expected, Some("xpired")),
        (
            "not yet",
            ca.leaf(&[&cart], not_yet_valid),
            &expected,
            Some("not valid yet"),
        ),
        (
            "client only",
            ca.leaf(&[&cart], client_auth_only),
            &expected,
            Some("extended key usage"),
        ),
    ] {
        let client = credentials(&ca, "web").client_config(expected).unwrap();
        let outcome = handshake(Arc::new(client), lax_server(leaf)).await;
        match error {
            None => assert!(outcome.client.is_ok(), "{case}: {outcome:?}"),
            Some(text) => {
                let refused = outcome.client.unwrap_err();
                assert!(refused.contains(text), "{case}: {refused}");
                assert!(outcome.server.is_err(), "{case}");
            }
        }
    }
}

#[tokio::test]
async fn clients_without_an_identity_of_the_trust_domain_are_refused() {
    let (ca, foreign) = (TestCa::new(), TestCa::new());
    let web = id("web").to_string();
    let server_auth_only = |params: &mut rcgen::CertificateParams| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    };
    for (case, leaf, error) in [
        ("good", Some(ca.leaf(&[&web], |_| {})), None),
        (
            "a later SAN",
            Some(ca.leaf(&["https://example.org/", &web], |_| {})),
            None,
        ),
        ("none", None, Some("certificate")),
        (
            "other domain",
            Some(ca.leaf(&["spiffe://td/ns/shop/sa/web"], |_| {})),
            Some("not of trust domain"),
        ),
        (
            "no SPIFFE SAN",
            Some(ca.leaf(&["https://cluster.local/web"], |_| {})),
            Some("the client is nobody"),
        ),
        ("no SAN", Some(ca.leaf(&[], |_| {})), Some("the client is nobody")),
        (
            "foreign",
            Some(foreign.leaf(&[&web], |_| {})),
            Some("UnknownIssuer"),
        ),
        ("expired", Some(ca.leaf(&[&web], expired)), Some("xpired")),
        (
            "server only",
            Some(ca.leaf(&[&web], server_auth_only)),
            Some("extended key usage"),
        ),
    ] {
        let server = credentials(&ca, "cart").server_config().unwrap();
        let outcome = handshake(Arc::new(lax_client(leaf)), server).await;
        match error {
            None => assert_eq!(outcome.server.unwrap().peer, Some(id("web")), "{case}"),
            Some(text) => {
                let refused = outcome.server.unwrap_err();
                assert!(refused.contains(text), "{case}: {refused}");
                assert!(outcome.client.is_err(), "{case}");
            }
        }
    }
}

#[tokio::test]
async fn another_application_protocol_is_refused() {
    let ca = TestCa::new();
    let mut client = lax_client(Some(ca.leaf(&[&id("web").to_string()], |_| {})));
    client.alpn_protocols = vec![b"http/1.1".to_vec()];
    let outcome = handshake(
        Arc::new(client),
        credentials(&ca, "cart").server_config().unwrap(),
    )
    .await;
    assert!(outcome.server.is_err() && outcome.client.is_err(), "{outcome:?}");

    let mut server = lax_server(ca.leaf(&[&id("cart").to_string()], |_| {}));
    server.alpn_protocols = vec![b"http/1.1".to_vec()];
    let client = credentials(&ca, "web").client_config(&[id("cart")]).unwrap();
    let outcome = handshake(Arc::new(client), server).await;
    assert!(outcome.server.is_err() && outcome.client.is_err(), "{outcome:?}");
}

#[tokio::test]
async fn other_suites_are_not_spoken() {
    let ca = TestCa::new();
    let with_suite = |suite| {
        let provider = CryptoProvider {
            cipher_suites: vec![suite],
            ..aws_lc_rs::default_provider()
        };
        let leaf = ca.leaf(&[&id("cart").to_string()], |_| {});
        ServerConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![leaf.certificate], leaf.key)
            .unwrap()
    };
    let client = Arc::new(credentials(&ca, "web").client_config(&[id("cart")]).unwrap());
    let aes128 = with_suite(aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256);
    assert!(handshake(Arc::clone(&client), aes128).await.client.is_ok());
    let chacha = with_suite(aws_lc_rs::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256);
    assert!(handshake(client, chacha).await.client.is_err());
}

#[tokio::test]
async fn a_tls_1_2_client_is_refused() {
    // A ClientHello without supported_versions (RFC 5246, 7.4.1.2), which is what TLS 1.2 sends.
    let extensions = [
        &[0x00, 0x0a, 0x00, 0x04, 0x00, 0x02, 0x00, 0x17][..], // supported_groups: secp256r1
        &[0x00, 0x0d, 0x00, 0x04, 0x00, 0x02, 0x04, 0x03],     // signature_algorithms: ecdsa_secp256r1_sha256
    ]
    .concat();
    let mut body = vec![0x03, 0x03];
    body.extend([7; 32]); // random
    body.extend([0x00]); // session id
    body.extend([0x00, 0x02, 0xc0, 0x2b]); // ECDHE-ECDSA-AES128-GCM-SHA256
    body.extend([0x01, 0x00]); // no compression
    body.extend(u16::try_from(extensions.len()).unwrap().to_be_bytes());
    body.extend(extensions);
    let mut hello = vec![0x01, 0x00];
    hello.extend(u16::try_from(body.len()).unwrap().to_be_bytes());
    hello.extend(body);
    let mut record = vec![0x16, 0x03, 0x01];
    record.extend(u16::try_from(hello.len()).unwrap().to_be_bytes());
    record.extend(hello);

    let ca = TestCa::new();
    let (mut near, far) = duplex(64 * 1024);
    let acceptor = TlsAcceptor::from(Arc::new(credentials(&ca, "cart").server_config().unwrap()));
    near.write_all(&record).await.unwrap();
    let refused = acceptor.accept(far).await.unwrap_err().to_string();
    let mut answer = Vec::new();
    near.read_to_end(&mut answer).await.unwrap();
    // Alert, fatal, protocol_version.
    assert_eq!((answer[0], &answer[5..]), (0x15, &[2, 70][..]), "{refused}");
}

#[tokio::test]
async fn the_client_sends_no_server_name() {
    let ca = TestCa::new();
    let client = Arc::new(credentials(&ca, "web").client_config(&[id("cart")]).unwrap());
    let name = ServerName::try_from("secret.example.org").unwrap();
    let mut connection = rustls::ClientConnection::new(client, name).unwrap();
    let mut hello = Vec::new();
    connection.write_tls(&mut hello).unwrap();
    assert!(!hello.windows(6).any(|bytes| bytes == b"secret"));
}

#[test]
fn credentials_that_peers_would_refuse_are_refused_first() {
    let (ca, foreign) = (TestCa::new(), TestCa::new());
    let good = || ca.svid(&id("web"));
    assert!(Credentials::new(&good()).is_ok());
    let refused = |change: &dyn Fn(&mut Svid)| {
        let mut svid = good();
        change(&mut svid);
        Credentials::new(&svid).unwrap_err()
    };
    assert!(matches!(
        refused(&|svid| svid.id = id("cart")),
        Error::OtherIdentity { .. }
    ));
    assert!(matches!(refused(&|svid| svid.roots.clear()), Error::NoRoots));
    assert!(matches!(
        refused(&|svid| svid.roots = vec![b"junk".to_vec().into()]),
        Error::NoRoots
    ));
    assert!(matches!(
        refused(&|svid| svid.roots = vec![foreign.certificate()]),
        Error::Unchained(_)
    ));
    assert!(matches!(refused(&|svid| svid.chain.clear()), Error::Unusable(_)));
    assert!(matches!(
        refused(&|svid| svid.key = good().key),
        Error::Unusable(_)
    ));

    let mut half = good();
    half.roots.insert(0, b"junk".to_vec().into());
    assert!(Credentials::new(&half).is_ok(), "one good root is enough");
}

#[test]
fn the_first_spiffe_name_is_the_peer() {
    let ca = TestCa::new();
    let of = |uris: &[&str]| peer_identity(&[ca.leaf(uris, |_| {}).certificate]);
    let [web, cart] = ["web", "cart"].map(|name| id(name).to_string());
    assert_eq!(of(&[&web]), Some(id("web")));
    assert_eq!(of(&["https://example.org/", &cart, &web]), Some(id("cart")));
    assert_eq!(of(&["https://example.org/"]), None);
    assert_eq!(of(&[]), None);
    assert_eq!(peer_identity(&[]), None);
    assert_eq!(peer_identity(&[b"junk".to_vec().into()]), None);
}

/// The verdicts are those of handshakes, for the same certificates.
#[tokio::test]
async fn two_would_meet_where_a_handshake_succeeds() {
    let (ca, other) = (TestCa::new(), TestCa::new());
    let foreign = SpiffeId::new("other.domain", "shop", "cart").unwrap();
    let of_foreign = || Credentials::new(&ca.svid(&foreign)).unwrap();
    let usage = |usage: ExtendedKeyUsagePurpose| {
        let leaf = ca.leaf(&[&id("web").to_string()], |params| {
            params.extended_key_usages = vec![usage];
        });
        let svid = Svid {
            chain: vec![leaf.certificate],
            key: leaf.key,
            ..ca.svid(&id("web"))
        };
        Credentials::new(&svid).unwrap()
    };
    for (name, client, server, meets) in [
        ("usual", credentials(&ca, "web"), credentials(&ca, "cart"), true),
        (
            "authorities",
            credentials(&ca, "web"),
            credentials(&other, "cart"),
            false,
        ),
        ("client's domain", of_foreign(), credentials(&ca, "cart"), false),
        ("both in another", of_foreign(), of_foreign(), true),
        (
            "no client's certificate",
            usage(ExtendedKeyUsagePurpose::ServerAuth),
            credentials(&ca, "cart"),
            false,
        ),
    ] {
        let config = client.client_config(std::slice::from_ref(&server.id)).unwrap();
        let outcome = handshake(Arc::new(config), server.server_config().unwrap()).await;
        assert_eq!(outcome.client.is_ok(), meets, "{name}: {outcome:?}");
        let met = client.would_meet(&server, SystemTime::now());
        assert_eq!(met.is_ok(), meets, "{name}: {met:?}");
        let day = Duration::from_secs(24 * 3600);
        for now in [SystemTime::now() - day, SystemTime::now() + day] {
            client.would_meet(&server, now).unwrap_err();
        }
    }
}

#[test]
fn a_certificate_whose_first_name_is_another_s_is_refused() {
    let ca = TestCa::new();
    let leaf = ca.leaf(&[&id("admin").to_string(), &id("web").to_string()], |_| {});
    let svid = Svid {
        chain: vec![leaf.certificate],
        key: leaf.key,
        ..ca.svid(&id("web"))
    };
    // Peers go by the first.
    assert!(matches!(
        Credentials::new(&svid),
        Err(Error::OtherIdentity { .. })
    ));
}

/// Under a list of the authority, which the publisher changes.
fn with_list(revocations: &Revocations) -> PeerRules {
    PeerRules {
        revocations: revocations.clone(),
        ..PeerRules::default()
    }
}

#[tokio::test]
async fn who_is_revoked_is_refused_from_the_next_handshake_on() {
    let ca = TestCa::new();
    let (web, cart) = (ca.svid(&id("web")), ca.svid(&id("cart")));
    let (revocations, publisher) = Revocations::fixed(ca.crl(&[], |_| {}).der());
    let under = |svid| Credentials::under(svid, &with_list(&revocations)).unwrap();
    let (strict_web, strict_cart) = (under(&web), under(&cart));
    let lax = |svid| Credentials::new(svid).unwrap();
    // The configurations are from before the lists change.
    let client = Arc::new(strict_web.client_config(&[id("cart")]).unwrap());
    let server = strict_cart.server_config().unwrap();
    let lax_client = Arc::new(lax(&web).client_config(&[id("cart")]).unwrap());
    let lax_server = lax(&cart).server_config().unwrap();
    let number = |svid: &Svid| {
        let number = serial(&svid.chain[0]);
        let digits: String = number.iter().map(|byte| format!("{byte:02X}")).collect();
        digits.trim_start_matches("00").to_owned()
    };

    let meets = handshake(Arc::clone(&client), server.clone()).await;
    assert!(meets.client.is_ok() && meets.server.is_ok(), "{meets:?}");
    strict_web.would_meet(&strict_cart, SystemTime::now()).unwrap();

    publisher.publish(ca.crl(&[&web.chain[0]], |_| {}).der());
    let refused = handshake(Arc::clone(&lax_client), server.clone()).await;
    let error = refused.server.unwrap_err();
    for part in [
        "spiffe://cluster.local/ns/shop/sa/web",
        "has been revoked by CN=test CA",
        &number(&web),
    ] {
        assert!(error.contains(part), "{part} is not in {error}");
    }
    assert!(refused.client.is_err());
    let error = strict_web
        .would_meet(&strict_cart, SystemTime::now())
        .unwrap_err();
    assert!(
        crate::telemetry::Chain(&error).to_string().contains("revoked"),
        "{error}"
    );

    publisher.publish(ca.crl(&[&cart.chain[0]], |_| {}).der());
    let refused = handshake(Arc::clone(&client), lax_server).await;
    let error = refused.client.unwrap_err();
    for part in [
        "spiffe://cluster.local/ns/shop/sa/cart",
        "has been revoked by CN=test CA",
        &number(&cart),
    ] {
        assert!(error.contains(part), "{part} is not in {error}");
    }
    assert!(refused.server.is_err());
    // The client is back.
    assert!(handshake(lax_client, server).await.server.is_ok());
}

#[tokio::test]
async fn no_session_brings_a_revoked_client_back() {
    let ca = TestCa::new();
    let (revocations, publisher) = Revocations::fixed(ca.crl(&[], |_| {}).der());
    let server = Credentials::under(&ca.svid(&id("cart")), &with_list(&revocations)).unwrap();
    let server = server.server_config().unwrap();
    let leaf = ca.leaf(&[&id("web").to_string()], |_| {});
    let list = ca.crl(&[&leaf.certificate], |_| {});
    // One that would resume: it keeps what the server gives it.
    let client = Arc::new(lax_client(Some(leaf)));
    for _ in 0..2 {
        let outcome = handshake(Arc::clone(&client), server.clone()).await;
        assert!(!outcome.server.unwrap().resumed && !outcome.client.unwrap().resumed);
    }
    publisher.publish(list.der());
    let refused = handshake(client, server).await;
    assert!(refused.server.unwrap_err().contains("revoked"));
}

#[tokio::test]
async fn a_proof_ends_when_it_is_revoked() {
    let ca = TestCa::new();
    let (web, cart) = (ca.svid(&id("web")), ca.svid(&id("cart")));
    let (revocations, publisher) = Revocations::fixed(ca.crl(&[], |_| {}).der());
    let server = Credentials::under(&cart, &with_list(&revocations)).unwrap();
    let (mut of_web, mut other) = (server.proof(&web.chain), server.proof(&cart.chain));
    let mut of_none = Credentials::new(&cart).unwrap().proof(&web.chain);
    let soon = Duration::from_secs(60);
    let (error, ()) = tokio::join!(tokio::time::timeout(soon, of_web.revoked()), async {
        tokio::task::yield_now().await;
        publisher.publish(ca.crl(&[], |_| {}).der());
        tokio::task::yield_now().await;
        publisher.publish(ca.crl(&[&web.chain[0]], |_| {}).der());
    });
    assert!(
        error
            .unwrap()
            .to_string()
            .contains("sa/web is refused: its certificate")
    );
    // Had it been made too late to hear of it, it would know.
    tokio::time::timeout(soon, server.proof(&web.chain).revoked())
        .await
        .unwrap();
    for proof in [&mut other, &mut of_none] {
        let mut revoked = Box::pin(proof.revoked());
        assert!(futures_util::FutureExt::now_or_never(revoked.as_mut()).is_none());
    }
}

#[tokio::test]
async fn an_alias_is_the_own_trust_domain_on_either_side() {
    let ca = TestCa::new();
    let old = |name: &str| SpiffeId::new("old.domain", "shop", name).unwrap();
    let foreign = SpiffeId::new("foreign", "shop", "web").unwrap();
    let rules = PeerRules {
        aliases: Aliases::of("cluster.local", ["old.domain"]).unwrap(),
        ..PeerRules::default()
    };
    let of = |id: &SpiffeId| Credentials::under(&ca.svid(id), &rules).unwrap();
    for (client, server, expected, problem) in [
        (old("web"), id("cart"), id("cart"), None),
        (id("web"), old("cart"), id("cart"), None),
        (id("web"), id("cart"), old("cart"), None),
        (old("web"), old("cart"), old("cart"), None),
        (
            id("web"),
            old("other"),
            id("cart"),
            Some("the server is spiffe://old.domain/ns/shop/sa/other"),
        ),
        (
            foreign.clone(),
            id("cart"),
            id("cart"),
            Some("not of trust domain"),
        ),
        (
            id("web"),
            foreign,
            id("web"),
            Some("the server is spiffe://foreign/"),
        ),
    ] {
        let config = of(&client)
            .client_config(std::slice::from_ref(&expected))
            .unwrap();
        let outcome = handshake(Arc::new(config), of(&server).server_config().unwrap()).await;
        match problem {
            // Each is told as it is, not as its alias.
            None => assert_eq!(
                (outcome.client.unwrap().peer, outcome.server.unwrap().peer),
                (Some(server), Some(client))
            ),
            Some(text) => {
                let errors = [outcome.client.err(), outcome.server.err()];
                assert!(
                    errors.iter().flatten().any(|error| error.contains(text)),
                    "{errors:?}"
                );
            }
        }
    }
}
