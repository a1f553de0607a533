//! The key of hashes that no client may predict: scopes of requests, and names of blocks outside the process.

use crate::spec::CacheScope;
use foretoken_core::kv::{BlockName, PrefixRoot};
use sha2::{Digest, Sha256};
use std::fmt;

/// A secret with which requests, and the blocks of their tokens, are hashed. It is random for each process, or that of the
/// folder in which the prefix cache is kept.
#[derive(Clone, PartialEq, Eq)]
pub struct CacheKey([u8; Self::LENGTH]);

impl CacheKey {
    /// Bytes of a key.
    pub const LENGTH: usize = 32;

    /// A random key.
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// The key with these bytes.
    pub fn of_bytes(bytes: [u8; Self::LENGTH]) -> Self {
        Self(bytes)
    }

    /// The bytes of the key.
    pub fn bytes(&self) -> &[u8; Self::LENGTH] {
        &self.0
    }

    /// The scope of requests with this API key and this `cache_salt`.
    pub fn scope(&self, api_key: Option<&str>, salt: Option<&str>) -> CacheScope {
        // An empty text is not none.
        let given = [u8::from(api_key.is_some()), u8::from(salt.is_some())];
        let [api_key, salt] = [api_key, salt].map(|text| text.unwrap_or_default().as_bytes());
        let hash = self.hash("scope", &[&given, api_key, salt]);
        let first = hash.iter().take(size_of::<u64>());
        CacheScope(first.fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
    }

    /// The name of all that is equal in `parts`, for one `purpose`.
    pub(crate) fn name(&self, purpose: &str, parts: &[&[u8]]) -> BlockName {
        BlockName(self.hash(purpose, parts))
    }

    /// The names of the full blocks of `tokens`, of `block_size` tokens each. Each stands for all tokens up to its end.
    pub(crate) fn chain(
        &self,
        pool: BlockName,
        root: PrefixRoot,
        tokens: &[u32],
        block_size: usize,
    ) -> Vec<BlockName> {
        let mut last = self.root(pool, root);
        let blocks = tokens.chunks_exact(block_size);
        blocks
            .map(|tokens| {
                last = self.after(last, tokens);
                last
            })
            .collect()
    }

    /// The name that the first block of a sequence comes after.
    pub(crate) fn root(&self, pool: BlockName, root: PrefixRoot) -> BlockName {
        let first = root.first.map_or(-1, i64::from);
        let parts = [&pool.0[..], &root.scope.to_le_bytes(), &first.to_le_bytes()];
        self.name("root", &parts)
    }

    /// The name of the block with `tokens` that comes after the block `last`.
    pub(crate) fn after(&self, last: BlockName, tokens: &[u32]) -> BlockName {
        let tokens: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.name("block", &[&last.0, &tokens])
    }

    /// SHA-256 of the key and of the parts, each with its length, cut to half.
    fn hash(&self, purpose: &str, parts: &[&[u8]]) -> [u8; 16] {
        let mut hash = Sha256::new();
        hash.update(self.0);
        for part in std::iter::once(&purpose.as_bytes()).chain(parts) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let mut name = [0; 16];
        name.copy_from_slice(&hash.finalize()[..16]);
        name
    }
}

/// Says nothing of the key.
impl fmt::Debug for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CacheKey")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_differ_where_keys_or_salts_do() {
        let key = CacheKey::of_bytes([7; 32]);
        let all = [
            (None, None),
            (Some(""), None),
            (None, Some("a")),
            (Some("a"), None),
            (Some("a"), Some("b")),
            (Some("ab"), None),
        ];
        let scopes = |key: &CacheKey| all.map(|(api_key, salt)| key.scope(api_key, salt).0);
        let mut found = scopes(&key).to_vec();
        assert_eq!(scopes(&key.clone()), found[..]);
        found.extend(scopes(&CacheKey::random()));
        found.sort_unstable();
        found.dedup();
        assert_eq!(found.len(), 2 * all.len());
    }

    #[test]
    fn a_name_stands_for_all_tokens_before() {
        let key = CacheKey::of_bytes([7; 32]);
        let (pool, root) = (BlockName([1; 16]), |scope| PrefixRoot {
            scope,
            first: None,
        });
        let chain = |scope, tokens: &[u32]| key.chain(pool, root(scope), tokens, 2);
        let first = chain(0, &[1, 2, 3, 4, 5]);
        assert_eq!(first.len(), 2);
        assert_eq!(chain(0, &[1, 2, 3, 4, 9, 9])[..2], first);
        let other = chain(0, &[1, 9, 3, 4]);
        assert!(other.iter().all(|name| !first.contains(name)));
        assert!(chain(1, &[1, 2]) != first[..1]);
        let of_head = PrefixRoot {
            first: Some(0),
            ..root(0)
        };
        assert!(key.chain(pool, of_head, &[1, 2], 2) != first[..1]);
        assert!(key.chain(BlockName([2; 16]), root(0), &[1, 2], 2) != first[..1]);
    }
}
