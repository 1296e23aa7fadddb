//! Parses responses of all stores: bounds, and the range of an object that they contain.

use std::io::Read;
use std::time::Duration;

use ureq::Body;
use ureq::http::{Response, StatusCode, header};

use super::objects::ObjectRange;
use crate::http;
use crate::range_source::{RemoteError, RemoteResult};

/// Maximum length of a list response in bytes.
pub(super) const MAX_LIST: u64 = 4 << 20;
/// Maximum pages of one list.
pub(super) const MAX_PAGES: usize = 100;

/// Returns the time limit of a request with a body of this length.
pub(super) fn request_timeout(bytes: u64) -> Option<Duration> {
    Some(http::REQUEST_TIMEOUT + Duration::from_secs(bytes / http::MIN_BYTES_PER_SECOND))
}

/// Reads a response with a part of an object; also returns the object's length if the response has
/// it.
pub(super) fn read_part(
    response: Response<Body>,
    part: ObjectRange,
    most: u64,
) -> RemoteResult<(Vec<u8>, Option<u64>)> {
    let wrong = || Err(RemoteError::Unsupported("its response is not for the requested range".into()));
    let declared = http::text(response.headers(), header::CONTENT_RANGE).and_then(http::content_range);
    match (response.status(), part, declared) {
        (StatusCode::PARTIAL_CONTENT, ObjectRange::Range(offset, length), Some((first, last, _))) => {
            // A shorter answer is a shorter object.
            if first != offset || last >= offset + length {
                return wrong();
            }
        }
        (StatusCode::PARTIAL_CONTENT, ObjectRange::All(_), Some((0, last, length))) if last + 1 == length => {}
        (StatusCode::PARTIAL_CONTENT, ObjectRange::Last(_), Some((_, last, length))) if last + 1 == length => {}
        (StatusCode::PARTIAL_CONTENT, ..) => return wrong(),
        // The whole object, no longer than requested.
        (StatusCode::OK, ObjectRange::All(_) | ObjectRange::Last(_), _) => {}
        (StatusCode::OK, ObjectRange::Range(0, _), _) => {}
        (StatusCode::OK, ..) => {
            return Err(RemoteError::Unsupported("it does not serve parts of objects (ranges)".into()));
        }
        // The object ends before the range begins.
        (StatusCode::RANGE_NOT_SATISFIABLE, ..) => return Ok((Vec::new(), None)),
        (status, ..) => return Err(RemoteError::Unsupported(format!("it responds with status {}", status.as_u16()))),
    }
    // Where an answer says no length of its own, its end looks as the end of its connection does.
    let promised = declared.filter(|_| response.status() == StatusCode::PARTIAL_CONTENT);
    let promised = promised.map(|(first, last, _)| (last + 1).saturating_sub(first));
    read_body(response, most).and_then(|bytes| match promised {
        Some(promised) if promised > bytes.len() as u64 => Err(cut_off()),
        Some(promised) if promised < bytes.len() as u64 => {
            Err(RemoteError::Unsupported("it sends more bytes than were requested".into()))
        }
        _ => Ok((bytes, declared.map(|(_, _, length)| length))),
    })
}

fn cut_off() -> RemoteError {
    RemoteError::Transient("its response was truncated".into())
}

/// Reads a whole body of bounded length.
pub(super) fn read_body(response: Response<Body>, most: u64) -> RemoteResult<Vec<u8>> {
    let length = http::text(response.headers(), header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
    let mut bytes = Vec::new();
    let mut reader = response.into_body().into_reader().take(most + 1);
    reader.read_to_end(&mut bytes).map_err(|error| RemoteError::Transient(http::printable(&error.to_string())))?;
    if bytes.len() as u64 > most {
        return Err(RemoteError::Unsupported("it sends more bytes than were requested".into()));
    }
    match length {
        Some(length) if length != bytes.len() as u64 => Err(cut_off()),
        _ => Ok(bytes),
    }
}

pub(super) fn store_time(response: &Response<Body>) -> Option<u64> {
    let text = http::text(response.headers(), header::DATE)?;
    http::date(text)
}

pub(super) fn read_list(response: Response<Body>) -> RemoteResult<String> {
    String::from_utf8(read_body(response, MAX_LIST)?).map_err(|_| invalid_list())
}

pub(super) fn invalid_list() -> RemoteError {
    RemoteError::Unsupported("its response is not a list".into())
}
