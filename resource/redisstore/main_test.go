package redisstore_test

import (
	"testing"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// durable are the arguments of a Redis that loses no acknowledged write.
var durable = []string{"--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"}

// server is the Redis of all tests but those that kill theirs.
var server *testbed.Server

func TestMain(m *testing.M) { testmain.Run(m, testmain.Redis(&server)) }
