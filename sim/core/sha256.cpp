#include "sim/core/sha256.hpp"

#include <openssl/evp.h>

#include <array>

#include "sim/core/error.hpp"

namespace pdsim {

namespace {

EVP_MD_CTX* md(void* context) {
  return static_cast<EVP_MD_CTX*>(context);
}

void start(void* context) {
  PDSIM_CHECK(EVP_DigestInit_ex(md(context), EVP_sha256(), nullptr) == 1, "libcrypto has no SHA-256");
}

}  // namespace

void Sha256::Free::operator()(void* context) const {
  EVP_MD_CTX_free(md(context));
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  PDSIM_CHECK(context_ != nullptr, "libcrypto gave no digest context");
  start(context_.get());
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(std::span<const char> bytes) {
  PDSIM_CHECK(EVP_DigestUpdate(md(context_.get()), bytes.data(), bytes.size()) == 1, "SHA-256 failed");
}

std::string Sha256::hex() {
  std::array<unsigned char, 32> digest{};
  PDSIM_CHECK(EVP_DigestFinal_ex(md(context_.get()), digest.data(), nullptr) == 1, "SHA-256 failed");
  start(context_.get());
  std::string out;
  out.reserve(2 * digest.size());
  for (const unsigned char byte : digest) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

std::string sha256_hex(std::span<const char> bytes) {
  Sha256 sha;
  sha.update(bytes);
  return sha.hex();
}

}  // namespace pdsim
