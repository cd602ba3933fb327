//! Certificates for peers that are not ours, signed by the development root of an agent.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, RevokedCertParams, SanType,
};

use crate::{process::output, wait};

/// It signs a list in milliseconds.
const OPENSSL_DEADLINE: Duration = Duration::from_secs(60);

/// The files of a peer's certificate, in PEM.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// Its certificate.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The root that it and all others chain to.
    pub root: PathBuf,
}

/// A root that certificates are signed by.
#[derive(Debug, Clone)]
pub struct Root {
    certificate: PathBuf,
    key: PathBuf,
}

impl Root {
    /// The development root of an agent, in its state directory.
    ///
    /// # Panics
    /// When the agent has made none.
    pub fn of_agent(state_dir: &Path) -> Self {
        let (certificate, key) = wait::until("the agent's development root", || root_files(state_dir));
        Self { certificate, key }
    }

    /// One of our own, which no agent trusts.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn create(directory: &Path) -> Self {
        let root = Self {
            certificate: directory.join("own-root.pem"),
            key: directory.join("own-root.key"),
        };
        let make = || -> Result<()> {
            let pair = KeyPair::generate()?;
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params
                .distinguished_name
                .push(DnType::CommonName, "a root of the tests");
            fs::write(&root.certificate, params.self_signed(&pair)?.pem())?;
            Ok(fs::write(&root.key, pair.serialize_pem())?)
        };
        make().unwrap_or_else(|error| panic!("making a root: {error:#}"));
        root
    }

    /// Makes a certificate for `identity`, in files that begin with `name`.
    ///
    /// # Panics
    /// When it cannot be signed or written.
    pub fn issue(&self, directory: &Path, name: &str, identity: &str) -> Credentials {
        sign(&self.certificate, &self.key, directory, name, identity, None)
            .unwrap_or_else(|error| panic!("a certificate for {identity}: {error:#}"))
    }
}

impl Root {
    /// The same, and it has expired years ago.
    ///
    /// # Panics
    /// When it cannot be signed or written.
    pub fn issue_expired(&self, directory: &Path, name: &str, identity: &str) -> Credentials {
        sign(
            &self.certificate,
            &self.key,
            directory,
            name,
            identity,
            Some((2001, 2002)),
        )
        .unwrap_or_else(|error| panic!("an expired certificate for {identity}: {error:#}"))
    }

    /// A list, in PEM, of the certificates that it has taken back, by their serial numbers as openssl prints them.
    ///
    /// # Panics
    /// When it cannot be signed.
    pub fn crl(&self, revoked: &[&str]) -> String {
        let make = || -> Result<String> {
            let key = KeyPair::from_pem(&fs::read_to_string(&self.key)?)?;
            let issuer = Issuer::from_ca_cert_pem(&fs::read_to_string(&self.certificate)?, key)?;
            let now = SystemTime::now();
            let revoked = revoked.iter().map(|serial| {
                Ok(RevokedCertParams {
                    serial_number: bytes(serial)?.into(),
                    revocation_time: now.into(),
                    reason_code: None,
                    invalidity_date: None,
                })
            });
            let params = CertificateRevocationListParams {
                this_update: now.into(),
                next_update: (now + Duration::from_secs(3600)).into(),
                crl_number: 1.into(),
                issuing_distribution_point: None,
                revoked_certs: revoked.collect::<Result<_>>()?,
                key_identifier_method: KeyIdMethod::Sha256,
            };
            Ok(params.signed_by(&issuer)?.pem()?)
        };
        make().unwrap_or_else(|error| panic!("a revocation list: {error:#}"))
    }

    /// The same by openssl's small authority, in `directory`. By its defaults such a list is of version 1.
    ///
    /// # Panics
    /// When openssl fails.
    pub fn crl_by_openssl(&self, directory: &Path, revoked: &[&Credentials]) -> String {
        let config = directory.join("openssl-ca.cnf");
        let database = directory.join("openssl-ca.index");
        let text = format!(
            "[ca]\ndefault_ca = own\n[own]\ndatabase = {}\ndefault_md = sha256\ndefault_crl_days = 1\n",
            database.display()
        );
        fs::write(&config, text).unwrap();
        fs::write(&database, "").unwrap();
        let ca = |arguments: &[&OsStr]| {
            let mut openssl = Command::new("openssl");
            openssl.args(["ca", "-batch", "-config"]).arg(&config);
            openssl
                .arg("-cert")
                .arg(&self.certificate)
                .arg("-keyfile")
                .arg(&self.key);
            run(openssl.args(arguments))
        };
        for files in revoked {
            ca(&["-revoke".as_ref(), files.certificate.as_ref()]);
        }
        let list = directory.join("openssl-ca.crl");
        ca(&["-gencrl".as_ref(), "-out".as_ref(), list.as_ref()]);
        fs::read_to_string(&list).unwrap()
    }

    /// Itself as a certificate that nobody else has signed.
    pub fn as_credentials(&self) -> Credentials {
        Credentials {
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            root: self.certificate.clone(),
        }
    }
}

impl Credentials {
    /// The certificate's serial number, as openssl prints it.
    ///
    /// # Panics
    /// When openssl fails.
    pub fn serial(&self) -> String {
        let mut openssl = Command::new("openssl");
        openssl
            .args(["x509", "-noout", "-serial", "-in"])
            .arg(&self.certificate);
        let text = run(&mut openssl);
        let serial = text.trim().strip_prefix("serial=");
        serial
            .unwrap_or_else(|| panic!("openssl says {text:?}"))
            .to_owned()
    }
}

/// An authority of this name, in memory.
///
/// # Panics
/// When it cannot be made.
pub fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Of hexadecimal digits.
fn bytes(text: &str) -> Result<Vec<u8>> {
    let byte = |at| Ok(u8::from_str_radix(&text[at..at + 2], 16)?);
    (0..text.len()).step_by(2).map(byte).collect()
}

/// What a program prints.
fn run(command: &mut Command) -> String {
    let (status, text) = output(command, OPENSSL_DEADLINE);
    assert!(status.success(), "{command:?}: {text}");
    text
}

/// The root's certificate and key: the files in PEM, by what they hold, whatever they are called.
fn root_files(state_dir: &Path) -> Option<(PathBuf, PathBuf)> {
    let (mut certificate, mut key) = (None, None);
    let mut directories = vec![state_dir.to_owned()];
    while let Some(directory) = directories.pop() {
        for path in fs::read_dir(directory).ok()?.flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap_or_default();
            if text.contains("BEGIN CERTIFICATE") {
                certificate = Some(path.clone());
            }
            if text.contains("PRIVATE KEY") {
                key = Some(path);
            }
        }
    }
    certificate.zip(key)
}

fn sign(
    root: &Path,
    key: &Path,
    directory: &Path,
    name: &str,
    identity: &str,
    years: Option<(i32, i32)>,
) -> Result<Credentials> {
    let root_pem = fs::read_to_string(root).with_context(|| format!("reading {}", root.display()))?;
    let key_pem = fs::read_to_string(key).with_context(|| format!("reading {}", key.display()))?;
    let issuer = Issuer::from_ca_cert_pem(&root_pem, KeyPair::from_pem(&key_pem)?)?;
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI(identity.try_into()?)];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    if let Some((from, to)) = years {
        params.not_before = rcgen::date_time_ymd(from, 1, 1);
        params.not_after = rcgen::date_time_ymd(to, 1, 1);
    }
    let pair = KeyPair::generate()?;
    let certificate = params.signed_by(&pair, &issuer)?;
    let credentials = Credentials {
        certificate: directory.join(format!("{name}.pem")),
        key: directory.join(format!("{name}.key")),
        root: directory.join(format!("{name}-roots.pem")),
    };
    fs::write(&credentials.certificate, certificate.pem())?;
    fs::write(&credentials.key, pair.serialize_pem())?;
    fs::write(&credentials.root, root_pem)?;
    Ok(credentials)
}
