# For a tap: Formula/foretoken.rb.
class Foretoken < Formula
  desc "OpenAI-compatible inference server with lossless speculative decoding"
  homepage "@REPOSITORY@"
  version "@VERSION@"
  license any_of: ["MIT", "Apache-2.0"]

  on_macos do
    depends_on arch: :arm64
    url "@REPOSITORY@/releases/download/v@VERSION@/foretoken-@VERSION@-aarch64-apple-darwin.tar.gz"
    sha256 "@SHA256 foretoken-@VERSION@-aarch64-apple-darwin.tar.gz@"
  end

  on_linux do
    on_arm do
      url "@REPOSITORY@/releases/download/v@VERSION@/foretoken-@VERSION@-aarch64-unknown-linux-musl.tar.gz"
      sha256 "@SHA256 foretoken-@VERSION@-aarch64-unknown-linux-musl.tar.gz@"
    end
    on_intel do
      url "@REPOSITORY@/releases/download/v@VERSION@/foretoken-@VERSION@-x86_64-unknown-linux-musl.tar.gz"
      sha256 "@SHA256 foretoken-@VERSION@-x86_64-unknown-linux-musl.tar.gz@"
    end
  end

  def install
    bin.install "foretoken"
    share.install Dir["share/*"]
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/foretoken --version")
  end
end
