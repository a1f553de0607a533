//! What the Hub says about a file.

use super::error::HubError;
use ureq::http::{HeaderMap, Uri};

/// The Hub's description of a file of a repository. It is not validated.
#[derive(Debug, Default)]
pub struct RemoteFile {
    /// Where its bytes are.
    pub url: String,
    /// The commit that the revision points to.
    pub commit: Option<String>,
    /// Identifies the content.
    pub etag: Option<String>,
    /// Whether the etag is that of a file of Git LFS: its SHA-256.
    pub is_linked: bool,
    /// Size in bytes, if the Hub reports it.
    pub size: Option<u64>,
    /// Whether the Hub itself has the bytes, so that they come with the same etag.
    pub is_here: bool,
}

impl RemoteFile {
    /// The file at `url`, of which nothing else is known yet.
    pub fn at(url: String) -> Self {
        Self {
            url,
            ..Self::default()
        }
    }

    /// Takes over the headers of an answer; those of a later answer take precedence.
    pub fn read(&mut self, headers: &HeaderMap, is_the_file: bool) {
        let own_size = header(headers, "content-length").filter(|_| is_the_file);
        let size = header(headers, "x-linked-size").or(own_size);
        let linked = header(headers, "x-linked-etag").map(|etag| bare(&etag));
        if let Some(etag) = linked.clone().or(etag(headers)) {
            self.etag = Some(etag);
            self.is_linked = linked.is_some();
        }
        self.is_here = is_the_file && !self.is_linked;
        self.commit = header(headers, "x-repo-commit").or(self.commit.take());
        self.size = size.and_then(|size| size.parse().ok()).or(self.size);
    }

    /// Checks what the headers of an answer from `uri` say about the bytes that it sends of the file: that they are
    /// some of `total`, if that is known, and of the file that was described.
    ///
    /// # Errors
    /// `Changed`, if they are not.
    pub fn confirm(
        &self,
        headers: &HeaderMap,
        uri: &Uri,
        total: Option<u64>,
    ) -> Result<(), HubError> {
        if let (Some(before), Some(total)) = (self.size, total)
            && before != total
        {
            let why = format!("it had {before} bytes, and now has {total}");
            return Err(HubError::Changed(why));
        }
        let now = etag(headers);
        // A store elsewhere has etags of its own.
        if self.is_here && *uri == *self.url && now.is_some() && now != self.etag {
            let why = "it was replaced meanwhile: its etag is another one";
            return Err(HubError::Changed(why.into()));
        }
        Ok(())
    }
}

/// The value of the header `name`.
pub(super) fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

fn etag(headers: &HeaderMap) -> Option<String> {
    header(headers, "etag").map(|etag| bare(&etag))
}

/// An etag without what says that it is one.
fn bare(etag: &str) -> String {
    etag.trim_start_matches("W/").trim_matches('"').to_owned()
}
