//! What all stores' answers have in common: their bounds, and what of an object they are about.

use std::io::Read;
use std::time::Duration;

use ureq::Body;
use ureq::http::{Response, StatusCode, header};

use super::objects::Part;
use crate::http;
use crate::range_source::Trouble;

pub(super) type Answer<T> = Result<T, Trouble>;

/// Longest answer of a list.
pub(super) const MAX_LIST: u64 = 4 << 20;
/// Answers that one list is put together from, where a store cuts it short.
pub(super) const MOST_ANSWERS: usize = 100;

/// How long a request with so many bytes may take.
pub(super) fn limit(bytes: u64) -> Option<Duration> {
    Some(http::REQUEST + Duration::from_secs(bytes / http::SLOWEST))
}

/// The bytes of an answer about a part of an object, and the object's length where that is said. None for an answer that is neither bytes nor the word that there are none.
pub(super) fn part(response: Response<Body>, part: Part, most: u64) -> Option<Answer<(Vec<u8>, Option<u64>)>> {
    let wrong = || Some(Err(Trouble::Unusable("its answer is not about the range that it was asked for".into())));
    let told = http::text(response.headers(), header::CONTENT_RANGE).and_then(http::content_range);
    match (response.status(), part, told) {
        (StatusCode::PARTIAL_CONTENT, Part::Range(offset, length), Some((first, last, _))) => {
            // A shorter answer is a shorter object.
            if first != offset || last >= offset + length {
                return wrong();
            }
        }
        (StatusCode::PARTIAL_CONTENT, Part::All(_), Some((0, last, length))) if last + 1 == length => {}
        (StatusCode::PARTIAL_CONTENT, Part::Last(_), Some((_, last, length))) if last + 1 == length => {}
        (StatusCode::PARTIAL_CONTENT, ..) => return wrong(),
        // All of an object that is no longer than what was asked for.
        (StatusCode::OK, Part::All(_) | Part::Last(_), _) => {}
        (StatusCode::OK, Part::Range(0, _), _) => {}
        (StatusCode::OK, ..) => {
            return Some(Err(Trouble::Unusable("it does not serve parts of objects (ranges)".into())));
        }
        (StatusCode::NOT_FOUND, ..) => return Some(Err(Trouble::Gone)),
        // The object ends before the range begins.
        (StatusCode::RANGE_NOT_SATISFIABLE, ..) => return Some(Ok((Vec::new(), None))),
        _ => return None,
    }
    // Where an answer says no length of its own, its end looks as the end of its connection does.
    let promised = told.filter(|_| response.status() == StatusCode::PARTIAL_CONTENT);
    let promised = promised.map(|(first, last, _)| (last + 1).saturating_sub(first));
    Some(body(response, most).and_then(|bytes| match promised {
        Some(promised) if promised > bytes.len() as u64 => Err(cut_off()),
        Some(promised) if promised < bytes.len() as u64 => {
            Err(Trouble::Unusable("it sends more than it was asked for".into()))
        }
        _ => Ok((bytes, told.map(|(_, _, length)| length))),
    }))
}

fn cut_off() -> Trouble {
    Trouble::Passing("its answer was cut off".into())
}

/// Why an answer is none that was hoped for.
pub(super) fn refusal(status: StatusCode) -> Trouble {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            Trouble::Refused(format!("it refuses the request (status {})", status.as_u16()))
        }
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
            Trouble::Passing(format!("status {}", status.as_u16()))
        }
        _ if status.is_server_error() => Trouble::Passing(format!("status {}", status.as_u16())),
        _ => Trouble::Unusable(format!("it answers with status {}", status.as_u16())),
    }
}

/// All of an answer that has so many bytes at most.
pub(super) fn body(response: Response<Body>, most: u64) -> Answer<Vec<u8>> {
    let length = http::text(response.headers(), header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
    let mut bytes = Vec::new();
    let mut reader = response.into_body().into_reader().take(most + 1);
    reader.read_to_end(&mut bytes).map_err(|error| Trouble::Passing(http::plain(&error.to_string())))?;
    if bytes.len() as u64 > most {
        return Err(Trouble::Unusable("it sends more than it was asked for".into()));
    }
    match length {
        Some(length) if length != bytes.len() as u64 => Err(cut_off()),
        _ => Ok(bytes),
    }
}

/// What the store's clock says.
pub(super) fn date(response: &Response<Body>) -> Option<u64> {
    let text = http::text(response.headers(), header::DATE)?;
    http::date(text)
}

/// The text of a list.
pub(super) fn list(response: Response<Body>) -> Answer<String> {
    String::from_utf8(body(response, MAX_LIST)?).map_err(|_| no_list())
}

pub(super) fn no_list() -> Trouble {
    Trouble::Unusable("its answer is no list".into())
}
