//! The page that a link opens: the same bytes for every handle, so that nothing is learnt or used
//! up by looking.

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{self, HeaderValue};
use lockbox_share_protocol::api;

use super::reply::{self, Reply};

/// Scripts and styles from here only, no frames, no forms, nothing else loaded, and no text that
/// becomes a script or an element.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// One of the embedded files, made by `share/page/build.mjs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asset {
    /// The page, for every path below `/s/`: a mail program may have made `%23` of the link's `#`,
    /// which the page repairs.
    Page,
    /// The page's script.
    Script,
    /// The page's style sheet.
    Style,
}

impl Asset {
    pub(super) fn of(path: &str) -> Option<Asset> {
        match path {
            "/assets/page.js" => Some(Asset::Script),
            "/assets/page.css" => Some(Asset::Style),
            _ => path.starts_with(api::PAGE).then_some(Asset::Page),
        }
    }

    pub(super) fn reply(self) -> Reply {
        let (content_type, bytes): (_, &'static [u8]) = match self {
            Asset::Page => ("text/html; charset=utf-8", include_bytes!("../../../page/dist/index.html")),
            Asset::Script => ("text/javascript; charset=utf-8", include_bytes!("../../../page/dist/page.js")),
            Asset::Style => ("text/css; charset=utf-8", include_bytes!("../../../page/dist/page.css")),
        };
        let mut reply = reply::with_type(StatusCode::OK, content_type, Bytes::from_static(bytes));
        let headers = reply.headers_mut();
        headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
        headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        headers.insert("x-robots-tag", HeaderValue::from_static("noindex, nofollow, noarchive"));
        headers.insert("cross-origin-opener-policy", HeaderValue::from_static("same-origin"));
        headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
        headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
        reply
    }
}
