#include "compiler/ir/param_role.h"

namespace refit {

RoleForm FormOf(ParamRole role) {
  using enum ParamRole;
  constexpr RoleForm kModelVector = {RoleScope::kModel, 1};
  constexpr RoleForm kModelMatrix = {RoleScope::kModel, 2};
  constexpr RoleForm kLayerVector = {RoleScope::kLayer, 1};
  constexpr RoleForm kLayerMatrix = {RoleScope::kLayer, 2};
  constexpr RoleForm kLinear = {RoleScope::kLayer, 2, true};
  constexpr RoleForm kLayerCube = {RoleScope::kLayer, 3};
  constexpr RoleForm kExpertLinear = {RoleScope::kExpert, 2, true};
  switch (role) {
    case kOther:
    case kCount:
    case kFinalNorm:
    case kFirstStage:
    case kLastStage:
    case kHyperHead:
      return kModelVector;
    case kEmbedding:
    case kOutputHead:
      return kModelMatrix;
    case kAttentionNorm:
    case kQueryBias:
    case kKeyBias:
    case kValueBias:
    case kQueryNorm:
    case kKeyNorm:
    case kQueryHeadsNorm:
    case kKeyHeadsNorm:
    case kIndexKeyNorm:
    case kIndexKeyNormBias:
    case kMlpInputNorm:
    case kMlpOutputNorm:
    case kAttentionOutputBias:
    case kAttentionSinks:
    case kQueryDownNorm:
    case kKeyValueDownNorm:
    case kMlpNorm:
    case kMoeNorm:
    case kRouterBias:
    case kRouterCorrection:
    case kMambaNorm:
    case kMambaInBias:
    case kMambaConvBias:
    case kMambaALog:
    case kMambaD:
    case kMambaDtBias:
    case kMambaGatedNorm:
    case kMambaOutBias:
    case kDeltaALog:
    case kDeltaDtBias:
    case kDeltaGatedNorm:
    case kMtpEmbeddingNorm:
    case kMtpHiddenNorm:
    case kMtpFinalNorm:
    case kColumn:
    case kReplicated:
    case kReplicatedFp32:
    case kAttentionSinksFp32:
      return kLayerVector;
    case kQuery:
    case kKey:
    case kValue:
    case kAttentionOutput:
    case kLatentQuery:
    case kQueryDown:
    case kQueryUp:
    case kKeyValueDown:
    case kKeyValueUp:
    case kIndexQuery:
    case kMlpGate:
    case kMlpUp:
    case kMlpDown:
    case kSharedExpertGate:
    case kSharedExpertUp:
    case kSharedExpertDown:
    case kDeltaQkvz:
    case kDeltaQkv:
    case kDeltaZ:
    case kDeltaOut:
    case kAttentionOutputDown:
    case kAttentionOutputUp:
      return kLinear;
    case kRouter:
    case kSharedExpertRouter:
    case kIndexKey:
    case kIndexWeights:
    case kLatentDown:
    case kLatentUp:
    case kFusedExpertGateUpBias:
    case kFusedExpertDownBias:
    case kMambaIn:
    case kMambaOut:
    case kDeltaBa:
    case kDeltaB:
    case kDeltaA:
    case kMtpProjection:
    case kHyperAttentionMix:
    case kRow:
      return kLayerMatrix;
    case kFusedExpertGateUp:
    case kFusedExpertDown:
    case kStackedExpertGateUp:
    case kStackedExpertDown:
    case kFusedExpertGateThenUp:
    case kMambaConv:
    case kDeltaConv:
      return kLayerCube;
    case kExpertGate:
    case kExpertUp:
    case kExpertDown:
      return kExpertLinear;
    case kTowerColumn:
    case kTowerHeads:
    case kTowerWhole:
    case kTowerConnector:
      return {RoleScope::kTower, 1};
    case kTowerRow:
    case kTowerPositions:
      return {RoleScope::kTower, 2};
  }
  return kModelVector;
}

}  // namespace refit
