package redislock_test

import (
	"testing"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var server *testbed.Server

func TestMain(m *testing.M) { testmain.Run(m, testmain.Redis(&server)) }
