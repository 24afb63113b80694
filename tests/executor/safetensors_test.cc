#include "runner/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace refit {
namespace {

class SafetensorsTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ =
        std::filesystem::path(testing::TempDir()) /
        ("safetensors_test." + std::to_string(getpid()) + "." +
         testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(directory_);
    path_ = (directory_ / "x.safetensors").string();
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  size_t FileCount() const {
    return std::distance(std::filesystem::directory_iterator(directory_), {});
  }

  // A file of the header's length, the header and `data_bytes` zeros.
  void WriteFile(const std::string& header, size_t data_bytes) {
    std::ofstream file(path_, std::ios::binary);
    const uint64_t length = header.size();
    file.write(reinterpret_cast<const char*>(&length), sizeof(length));
    file << header << std::string(data_bytes, '\0');
  }

  // What Open says of the file, without the path.
  std::string Refusal() {
    const auto reader = SafetensorsReader::Open(path_);
    EXPECT_FALSE(reader.ok());
    const std::string message(reader.status().message());
    EXPECT_EQ(message.find(path_ + ": "), 0) << message;
    return message.substr(path_.size() + 2);
  }

  static BoundTensor Tensor(const std::string& name, DType dtype,
                            std::vector<uint64_t> shape) {
    BoundTensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = shape;
    tensor.size_bytes = DTypeBytes(dtype);
    for (const uint64_t extent : shape) tensor.size_bytes *= extent;
    return tensor;
  }

  std::filesystem::path directory_;
  std::string path_;
};

TEST_F(SafetensorsTest, WhatIsWrittenIsRead) {
  auto writer = SafetensorsWriter::Create(
      path_, {Tensor("a \"quoted\"", DType::kBf16, {3, 1}),
              Tensor("scalar", DType::kFp32, {}),
              Tensor("empty", DType::kFp16, {0, 7})});
  ASSERT_TRUE(writer.ok()) << writer.status();
  std::memset(writer->tensors()[0].data, 1, 6);
  std::memset(writer->tensors()[1].data, 2, 4);
  ASSERT_TRUE(writer->Finish().ok());
  ASSERT_TRUE(writer->Commit().ok());
  const auto reader = SafetensorsReader::Open(path_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ(reader->tensors().size(), 3);
  // The widest elements come first.
  const BoundTensor& scalar = reader->tensors()[0];
  const BoundTensor& matrix = reader->tensors()[1];
  EXPECT_EQ(scalar.name, "scalar");
  EXPECT_EQ(scalar.dtype, DType::kFp32);
  EXPECT_TRUE(scalar.shape.empty());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(scalar.data) % 8, 0);
  EXPECT_EQ(std::memcmp(scalar.data, "\2\2\2\2", 4), 0);
  EXPECT_EQ(matrix.name, "a \"quoted\"");
  EXPECT_EQ(matrix.shape, (std::vector<uint64_t>{3, 1}));
  EXPECT_EQ(std::memcmp(matrix.data, "\1\1\1\1\1\1", 6), 0);
  EXPECT_EQ(reader->tensors()[2].size_bytes, 0);
}

TEST_F(SafetensorsTest, NothingIsLeftOfAFileThatIsNotCommitted) {
  {
    auto writer =
        SafetensorsWriter::Create(path_, {Tensor("a", DType::kBf16, {3})});
    ASSERT_TRUE(writer.ok());
    EXPECT_EQ(FileCount(), 1);
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
  EXPECT_EQ(FileCount(), 0);
}

TEST_F(SafetensorsTest, CommitCanBeUndone) {
  {
    auto writer =
        SafetensorsWriter::Create(path_, {Tensor("new", DType::kFp32, {4})});
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE(writer->Finish().ok());
    ASSERT_TRUE(writer->Commit().ok());
    writer->Undo();
  }
  EXPECT_EQ(FileCount(), 0);
  WriteFile("{}", 3);
  const auto older_size = std::filesystem::file_size(path_);
  for (const bool undo : {true, false}) {
    {
      auto writer =
          SafetensorsWriter::Create(path_, {Tensor("new", DType::kFp32, {4})});
      ASSERT_TRUE(writer.ok()) << writer.status();
      ASSERT_TRUE(writer->Finish().ok());
      ASSERT_TRUE(writer->Commit().ok());
      EXPECT_NE(std::filesystem::file_size(path_), older_size);
      if (undo) writer->Undo();
    }
    EXPECT_EQ(std::filesystem::file_size(path_) == older_size, undo);
    EXPECT_EQ(FileCount(), 1);
  }
}

TEST_F(SafetensorsTest, DirectoryThatIsMissingIsAnError) {
  const std::string path = (directory_ / "no" / "x").string();
  EXPECT_EQ(SafetensorsWriter::Create(path, {}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsReader::Open(path).status().message(),
            path + ": No such file or directory");
}

TEST_F(SafetensorsTest, MetadataIsPassedOver) {
  WriteFile(R"({"__metadata__":{"format":"pt"},)"
            R"("a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})",
            4);
  const auto reader = SafetensorsReader::Open(path_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->tensors().size(), 1);
}

TEST_F(SafetensorsTest, FileThatIsTooShortIsRefused) {
  std::ofstream(path_) << "1234";
  EXPECT_EQ(Refusal(), "not a safetensors file: shorter than 8 bytes");
}

TEST_F(SafetensorsTest, HeaderLongerThanTheFileIsRefused) {
  std::ofstream(path_) << "\xff\xff\xff\xff\xff\xff\xff\x7f{}";
  EXPECT_EQ(Refusal(),
            "not a safetensors file: a header of 9223372036854775807 bytes in "
            "a file of 10");
}

TEST_F(SafetensorsTest, HeaderThatIsNotJsonIsRefused) {
  WriteFile("{\"a\":", 0);
  EXPECT_EQ(Refusal(), "header byte 5: Invalid value.");
  WriteFile("[]", 0);
  EXPECT_EQ(Refusal(), "the header is not an object");
}

TEST_F(SafetensorsTest, DeepNestingIsRefusedWithoutDeepRecursion) {
  WriteFile(std::string(1'000'000, '['), 0);
  EXPECT_EQ(Refusal(), "header byte 1000000: Invalid value.");
}

TEST_F(SafetensorsTest, EachBadDescriptionIsNamed) {
  const struct {
    const char* description;
    const char* problem;
  } cases[] = {
      {"1", "its description is not an object"},
      {R"({"shape":[2],"data_offsets":[0,4]})", "dtype is not a string"},
      {R"({"dtype":"X9","shape":[2],"data_offsets":[0,4]})",
       "unknown dtype \"X9\""},
      {R"({"dtype":"BF16","shape":[-1],"data_offsets":[0,4]})",
       "shape is not a list of sizes"},
      {R"({"dtype":"BF16","shape":[2],"data_offsets":[0]})",
       "data_offsets is not a pair of sizes"},
      {R"({"dtype":"BF16","shape":[2],"data_offsets":[4,0]})",
       "data_offsets [4, 0] are outside the file's 4 data bytes"},
      {R"({"dtype":"BF16","shape":[3],"data_offsets":[0,6]})",
       "data_offsets [0, 6] are outside the file's 4 data bytes"},
      {R"({"dtype":"BF16","shape":[3],"data_offsets":[0,4]})",
       "its shape and dtype do not have 4 bytes"},
      {R"({"dtype":"BF16","shape":[4294967296,4294967296],)"
       R"("data_offsets":[0,0]})",
       "its shape and dtype do not have 0 bytes"},
  };
  for (const auto& c : cases) {
    WriteFile(std::string("{\"a\":") + c.description + "}", 4);
    EXPECT_EQ(Refusal(), std::string("tensor \"a\": ") + c.problem);
  }
}

TEST_F(SafetensorsTest, NameThatStandsTwiceIsRefused) {
  WriteFile(R"({"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},)"
            R"("a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})",
            4);
  EXPECT_EQ(Refusal(), "tensor \"a\" stands there twice");
}

}  // namespace
}  // namespace refit
