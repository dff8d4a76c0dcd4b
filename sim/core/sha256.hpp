// SHA-256: the name by which a result remembers its inputs (scenario, trace, profile, prices).
//
// Over OpenSSL's libcrypto, which uses the machine's SHA instructions: a trace is digested while it
// is read, in one pass. The OpenSSL headers stay in sha256.cpp.
#pragma once

#include <memory>
#include <span>
#include <string>

namespace pdsim {

/// The digest of bytes that come in pieces. May be moved, not copied.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(std::span<const char> bytes);
  /// 64 lower-case hexadecimal digits. The digest then starts afresh.
  std::string hex();

 private:
  struct Free {
    void operator()(void* context) const;
  };
  std::unique_ptr<void, Free> context_;  ///< an EVP_MD_CTX
};

/// The digest of bytes that are all there.
std::string sha256_hex(std::span<const char> bytes);

}  // namespace pdsim
