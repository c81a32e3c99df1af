package testbed_test

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/url"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb/types"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource/dynamostore"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// awsClient is a client of what Server.URL says.
func awsClient(s *testbed.Server) (aws.Config, error) {
	u, err := url.Parse(s.URL)
	if err != nil {
		return aws.Config{}, err
	}
	secret, _ := u.User.Password()
	return aws.Config{
		Region: "us-east-1", BaseEndpoint: aws.String("http://" + s.Addr),
		Credentials: credentials.NewStaticCredentialsProvider(u.User.Username(), secret, ""),
		HTTPClient:  &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}, nil
}

func onS3(s *testbed.Server, f func(*s3.Client) error) error {
	config, err := awsClient(s)
	if err != nil {
		return err
	}
	return f(s3.NewFromConfig(config, func(o *s3.Options) { o.UsePathStyle = true }))
}

func onDynamoDB(s *testbed.Server, f func(*dynamodb.Client) error) error {
	config, err := awsClient(s)
	if err != nil {
		return err
	}
	return f(dynamodb.NewFromConfig(config))
}

var (
	bucket = aws.String("kept")
	object = aws.String("kept")
)

var s3Life = life{
	start:   testbed.StartS3,
	version: `^VERSITYGW$`,
	put: func(ctx context.Context, s *testbed.Server) error {
		return onS3(s, func(c *s3.Client) error {
			_, err := c.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: bucket})
			if err == nil {
				_, err = c.PutObject(ctx, &s3.PutObjectInput{Bucket: bucket, Key: object, Body: bytes.NewReader([]byte("kept"))})
			}
			return err
		})
	},
	get: func(ctx context.Context, s *testbed.Server) (kept bool, err error) {
		err = onS3(s, func(c *s3.Client) error {
			out, err := c.GetObject(ctx, &s3.GetObjectInput{Bucket: bucket, Key: object})
			if refusal, ok := errors.AsType[smithy.APIError](err); ok && refusal.ErrorCode() == "NoSuchBucket" {
				return nil
			}
			if err == nil {
				kept = true
				err = out.Body.Close()
			}
			return err
		})
		return kept, err
	},
}

func TestS3(t *testing.T) {
	onProviders(t, "s3", func(t *testing.T, p testbed.Provider) { requireLife(t, p, s3Life) })
}

func TestDynamoDB(t *testing.T) {
	onProviders(t, "dynamodb", func(t *testing.T, p testbed.Provider) {
		requireLife(t, p, life{
			start:    testbed.StartDynamoDB,
			version:  `\S`,
			volatile: true,
			put: func(ctx context.Context, s *testbed.Server) error {
				return onDynamoDB(s, func(c *dynamodb.Client) error {
					_, err := c.CreateTable(ctx, dynamostore.Schema("kept"))
					return err
				})
			},
			get: func(ctx context.Context, s *testbed.Server) (kept bool, err error) {
				err = onDynamoDB(s, func(c *dynamodb.Client) error {
					_, err := c.DescribeTable(ctx, &dynamodb.DescribeTableInput{TableName: aws.String("kept")})
					if _, gone := errors.AsType[*types.ResourceNotFoundException](err); gone {
						return nil
					}
					kept = err == nil
					return err
				})
				return kept, err
			},
		})
	})
}

func TestS3ThatEnds(t *testing.T) {
	onProviders(t, "s3", func(t *testing.T, p testbed.Provider) {
		_, err := testbed.StartS3(t.Context(), &testbed.Options{Provider: p, Args: []string{"--no-such-flag"}})
		require.ErrorContains(t, err, "exit")
		// In the order in which a container's log has them, what it says of the flag comes before what it says of all others.
		require.Regexp(t, `no-such-flag|\$VGW_`, err.Error(), "the end of its log is in the error")
	})
}

func TestS3External(t *testing.T) {
	users, err := testbed.StartS3(t.Context(), nil)
	testbed.Need(t, err)
	defer func() { require.NoError(t, users.Close()) }()

	for _, set := range []string{users.Addr, users.URL, users.URL + "/"} {
		t.Setenv(testbed.EnvS3Addr, set)
		s, err := testbed.StartS3(t.Context(), &testbed.Options{Provider: testbed.External})
		testbed.Need(t, err)
		require.Equal(t, users.Addr, s.Addr)
		require.Equal(t, users.URL, s.URL)
		require.ErrorIs(t, s.Kill(t.Context()), errors.ErrUnsupported)
		require.NoError(t, s.Close())
	}
	require.True(t, listens(t, users.Addr), "Close leaves the user's server alone")

	for set, want := range map[string]string{
		"127.0.0.1:1":                        "the server at 127.0.0.1:1 (FENCELAB_S3_ADDR) does not answer",
		"http://id:hunter2@" + users.Addr:    "does not answer",
		"ftp://id:hunter2@" + users.Addr:     "FENCELAB_S3_ADDR is neither host:port nor an http:// or https:// URL of a service",
		"http://id:hunter2@host:port":        "FENCELAB_S3_ADDR is neither",
		users.URL + "/bucket":                "FENCELAB_S3_ADDR is neither",
		"127.0.0.1:1," + users.Addr + "/../": "does not answer",
	} {
		t.Setenv(testbed.EnvS3Addr, set)
		_, err = testbed.StartS3(t.Context(), &testbed.Options{Provider: testbed.External})
		require.ErrorContains(t, err, want, set)
		require.NotContains(t, err.Error(), "hunter2")
	}
}

func TestDynamoDBExternal(t *testing.T) {
	users, err := testbed.StartDynamoDB(t.Context(), nil)
	testbed.Need(t, err)
	defer func() { require.NoError(t, users.Close()) }()
	t.Setenv(testbed.EnvDynamoDBAddr, users.Addr)
	s, err := testbed.StartDynamoDB(t.Context(), &testbed.Options{Provider: testbed.External})
	testbed.Need(t, err)
	require.Equal(t, users.URL, s.URL)
	require.Equal(t, users.Version, s.Version)
	require.NoError(t, s.Close())
	require.True(t, listens(t, users.Addr))
}
