//! Certificates that their authorities have taken back: revocation lists (RFC 5280, section 5), and whether a peer is on one.
//!
//! `tls` asks after a chain has been found good; [`super::crl_file`] brings the lists. What is on no list is not revoked, whether or not
//! its authority has one. A list counts past the time of its next update: it still says who must not be let in, while to refuse
//! everybody would stop the mesh whenever whoever publishes it is away.

use std::collections::HashSet;

use rustls::RootCertStore;
use rustls_pki_types::{
    CertificateDer, CertificateRevocationListDer, SignatureVerificationAlgorithm, pem::PemObject,
};
use serde::Serialize;
use x509_parser::{
    asn1_rs::{Any, Oid, oid},
    extensions::ParsedExtension,
    prelude::{FromDer, X509Certificate},
    revocation_list::CertificateRevocationList,
    time::ASN1Time,
};

use super::states;

/// What a list in PEM begins with: RFC 7468, section 6.
const PEM_BEGIN: &[u8] = b"-----BEGIN X509 CRL-----";
/// What DER begins with here: a SEQUENCE.
const DER_BEGIN: u8 = 0x30;

/// What makes a list one of changes to another: RFC 5280, section 5.2.4.
const DELTA: Oid<'static> = oid!(2.5.29.27);

/// Why there are no lists in a file's content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Invalid {
    #[error("it holds no revocation list: neither \"-----BEGIN X509 CRL-----\" nor DER")]
    None,
    #[error("it is cut off, or no PEM")]
    Pem,
    #[error("revocation list {number} of it: {problem}")]
    List { number: usize, problem: &'static str },
}

/// Why a peer is refused whose chain is good otherwise.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Barred {
    /// Its own certificate is on a list.
    #[error("its certificate with serial number {serial} has been revoked by {issuer}")]
    Leaf {
        /// Hexadecimal, as openssl prints it.
        serial: String,
        /// Name of the authority.
        issuer: String,
    },
    /// One of those that its certificate leads to is.
    #[error(
        "the authority {subject} with serial number {serial}, by which it is vouched for, has been revoked by {issuer}"
    )]
    Authority {
        /// Whose certificate it is.
        subject: String,
        /// Hexadecimal.
        serial: String,
        /// Name of the authority that has signed it.
        issuer: String,
    },
    /// Nothing can be said of one.
    #[error("it shows a certificate that cannot be read, and so not be looked for in the revocation lists")]
    Unreadable,
}

/// Revocation lists.
#[derive(Debug, Default)]
pub(super) struct Lists(Vec<List>);

#[derive(Debug)]
struct List {
    /// DER of the name that the revoked certificates have as their issuer's.
    issuer: Box<[u8]>,
    /// Without leading zeros.
    serials: HashSet<Box<[u8]>>,
    signed: Signed,
    updated: ASN1Time,
    next_update: Option<ASN1Time>,
}

/// What of a list, or of a certificate, is needed to tell who has signed it.
#[derive(Debug)]
struct Signed {
    content: Box<[u8]>,
    /// DER of an AlgorithmIdentifier, without its own tag and length.
    algorithm: Box<[u8]>,
    signature: Box<[u8]>,
}

/// A list, as it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ListView {
    /// Name of the authority.
    pub issuer: String,
    /// RFC 3339.
    pub this_update: String,
    /// RFC 3339; absent where the list promises none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_update: Option<String>,
    /// The time of the next update is over. The list counts all the same.
    pub is_overdue: bool,
    /// Certificates on it.
    pub revoked: usize,
}

impl Lists {
    /// All lists in a file's content: PEM, or DER, one after another.
    ///
    /// # Errors
    /// When there is none, or one that cannot be used: then none of them is.
    pub(super) fn parse(content: &[u8]) -> Result<Self, Invalid> {
        let lists = if content.windows(PEM_BEGIN.len()).any(|part| part == PEM_BEGIN) {
            let ders: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(content).collect();
            let ders = ders.map_err(|_| Invalid::Pem)?;
            let parsed = ders.iter().enumerate().map(|(at, der)| {
                let problem = |problem| Invalid::List {
                    number: at + 1,
                    problem,
                };
                match List::parse(der).map_err(problem)? {
                    ([], list) => Ok(list),
                    _ => Err(problem("there is something behind it")),
                }
            });
            parsed.collect::<Result<Vec<_>, _>>()?
        } else {
            let (mut rest, mut lists) = (content, Vec::new());
            while rest.first() == Some(&DER_BEGIN) {
                let number = lists.len() + 1;
                let (after, list) = List::parse(rest).map_err(|problem| Invalid::List { number, problem })?;
                lists.push(list);
                rest = after;
            }
            if let (false, [_, ..]) = (lists.is_empty(), rest) {
                let problem = "what follows is no list";
                return Err(Invalid::List {
                    number: lists.len(),
                    problem,
                });
            }
            lists
        };
        match lists.is_empty() {
            true => Err(Invalid::None),
            false => Ok(Self(lists)),
        }
    }

    /// Whether none of a peer's certificates is on a list of the authority that has signed it. `chain` is what the peer has shown and
    /// what leads to `roots`, leaf first.
    ///
    /// # Errors
    /// The first that is on one.
    pub(super) fn check<'a>(
        &self,
        chain: impl Iterator<Item = &'a CertificateDer<'a>>,
        roots: &RootCertStore,
    ) -> Result<(), Barred> {
        if self.0.is_empty() {
            return Ok(());
        }
        let chain = chain.map(|der| X509Certificate::from_der(der).map(|(_, certificate)| certificate));
        let chain: Vec<_> = chain.collect::<Result<_, _>>().map_err(|_| Barred::Unreadable)?;
        for (at, certificate) in chain.iter().enumerate() {
            let (issuer, serial) = (
                certificate.issuer().as_raw(),
                significant(certificate.raw_serial()),
            );
            let of_issuer = self.0.iter().filter(|list| *list.issuer == *issuer);
            let listed: Vec<_> = of_issuer.filter(|list| list.serials.contains(serial)).collect();
            // What is on none needs no signature.
            if listed.is_empty() {
                continue;
            }
            // Numbers are of a key: its list counts whose key has signed the certificate.
            let itself = Signed::of(certificate.as_raw()).ok_or(Barred::Unreadable)?;
            let is_listed_by = |key: &[u8]| listed.iter().any(|list| list.signed.is_by(key));
            if !keys(issuer, &chain, roots).any(|key| itself.is_by(key) && is_listed_by(key)) {
                continue;
            }
            let (serial, issuer) = (hexadecimal(serial), certificate.issuer().to_string());
            return Err(match at {
                0 => Barred::Leaf { serial, issuer },
                _ => Barred::Authority {
                    subject: certificate.subject().to_string(),
                    serial,
                    issuer,
                },
            });
        }
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Certificates that are on them.
    pub(super) fn revoked(&self) -> usize {
        self.0.iter().map(|list| list.serials.len()).sum()
    }

    pub(super) fn views(&self) -> Vec<ListView> {
        self.0.iter().map(List::view).collect()
    }
}

impl List {
    fn parse(der: &[u8]) -> Result<(&[u8], Self), &'static str> {
        let (rest, list) =
            CertificateRevocationList::from_der(der).map_err(|_| "it is cut off, or no revocation list")?;
        let signed = Signed::of(list.as_raw()).ok_or("its signature cannot be read")?;
        if !algorithms().any(|known| *known.signature_alg_id() == *signed.algorithm) {
            return Err("the algorithm of its signature is not supported");
        }
        for extension in list.extensions() {
            if extension.oid == DELTA {
                return Err("it is a delta list, which is not supported");
            }
            match extension.parsed_extension() {
                ParsedExtension::IssuingDistributionPoint(point) if point.indirect_crl => {
                    return Err("it is of several authorities (indirect), which is not supported");
                }
                // What it is a list of matters little: whoever is on it is revoked.
                ParsedExtension::IssuingDistributionPoint(_) => {}
                _ if extension.critical => return Err("it has a critical extension that is not supported"),
                _ => {}
            }
        }
        let entries = || list.iter_revoked_certificates();
        if entries().any(|entry| entry.extensions().iter().any(|extension| extension.critical)) {
            return Err("an entry has a critical extension that is not supported");
        }
        let parsed = Self {
            issuer: list.issuer().as_raw().into(),
            serials: entries()
                .map(|entry| significant(entry.raw_serial()).into())
                .collect(),
            signed,
            updated: list.last_update(),
            next_update: list.next_update(),
        };
        Ok((rest, parsed))
    }

    fn view(&self) -> ListView {
        let issuer = x509_parser::x509::X509Name::from_der(&self.issuer);
        ListView {
            issuer: issuer.map(|(_, name)| name.to_string()).unwrap_or_default(),
            this_update: states::rfc3339(self.updated),
            next_update: self.next_update.map(states::rfc3339),
            is_overdue: self.next_update.is_some_and(|next| next < ASN1Time::now()),
            revoked: self.serials.len(),
        }
    }
}

impl Signed {
    /// Of its DER: a SEQUENCE of content, algorithm and signature.
    fn of(der: &[u8]) -> Option<Self> {
        let whole = content(der)?;
        let (rest, _) = Any::from_der(whole).ok()?;
        let signed = &whole[..whole.len() - rest.len()];
        let (rest, algorithm) = Any::from_der(rest).ok()?;
        Some(Self {
            content: signed.into(),
            algorithm: algorithm.data.into(),
            signature: bits(rest)?.into(),
        })
    }

    /// Whether the owner of a key has signed it: a SubjectPublicKeyInfo without its own tag and length.
    fn is_by(&self, key: &[u8]) -> bool {
        let Ok((rest, algorithm)) = Any::from_der(key) else {
            return false;
        };
        let Some(key) = bits(rest) else { return false };
        algorithms()
            .filter(|known| *known.signature_alg_id() == *self.algorithm)
            .filter(|known| *known.public_key_alg_id() == *algorithm.data)
            .any(|known| {
                known
                    .verify_signature(key, &self.content, &self.signature)
                    .is_ok()
            })
    }
}

/// The keys of whoever has this name, as SubjectPublicKeyInfo without its own tag and length. They may be several: Istio's own authorities
/// are all called the same, one after another.
fn keys<'a>(
    name: &'a [u8],
    chain: &'a [X509Certificate<'a>],
    roots: &'a RootCertStore,
) -> impl Iterator<Item = &'a [u8]> {
    let above = chain.iter().filter(move |above| above.subject().as_raw() == name);
    let above = above.filter_map(|above| content(above.public_key().raw));
    let anchors = roots
        .roots
        .iter()
        .filter(move |root| content(name) == Some(&*root.subject));
    above.chain(anchors.map(|root| &*root.subject_public_key_info))
}

fn algorithms() -> impl Iterator<Item = &'static dyn SignatureVerificationAlgorithm> {
    super::tls::PROVIDER
        .signature_verification_algorithms
        .all
        .iter()
        .copied()
}

/// What is within the outermost tag.
fn content(der: &[u8]) -> Option<&[u8]> {
    Some(Any::from_der(der).ok()?.1.data)
}

/// The bytes of a BIT STRING, of which the first tells how many bits are left over: none here.
fn bits(der: &[u8]) -> Option<&[u8]> {
    content(der)?.strip_prefix(&[0])
}

/// A serial number without what makes it positive.
fn significant(serial: &[u8]) -> &[u8] {
    let zeros = serial.iter().take_while(|byte| **byte == 0).count();
    &serial[zeros..]
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02X}")).collect()
}

#[cfg(test)]
mod tests;
