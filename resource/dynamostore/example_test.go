package dynamostore_test

import (
	"context"
	"fmt"
	"log"
	"net/http/httptest"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/truora/minidyn/server"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/dynamostore"
)

// bill is what the holder of a lock does. token comes from the lock's grant.
func bill(ctx context.Context, client *dynamodb.Client, token uint64) error {
	accounts, err := dynamostore.New(client, "accounts") // a table made by dynamostore.CreateTable
	if err != nil {
		return err
	}
	account, err := accounts.ReadFenced(ctx, "acme", resource.Fence{Token: token})
	if err != nil {
		return err
	}
	return accounts.Write(ctx, "acme", resource.Fence{Token: token, Seq: 1}, append(account.Value, "billed"...))
}

func Example() {
	fake := httptest.NewServer(server.NewServer()) // stands for DynamoDB
	defer fake.Close()
	client := dynamodb.New(dynamodb.Options{
		Region: "us-east-1", BaseEndpoint: aws.String(fake.URL), Credentials: credentials.NewStaticCredentialsProvider("id", "secret", ""),
	})
	ctx := context.Background()
	if err := dynamostore.CreateTable(ctx, client, "accounts"); err != nil {
		log.Fatal(err)
	}

	// 7 was granted to a slow holder, 8 to its successor.
	fmt.Println(bill(ctx, client, 8))
	fmt.Println(bill(ctx, client, 7))
	// Output:
	// <nil>
	// resource: stale fencing token for "acme": seen 8, got 7
}
